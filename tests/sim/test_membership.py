"""Votes on a swarm's rounds: no stranger decides, no member alone in its own time, and no voter twice."""

import asyncio
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from p2ptrain.averaging.commit.lost_state import WAITS_BEFORE_FOUNDING
from p2ptrain.averaging.context import ballots_in
from p2ptrain.averaging.grouping.messages import JOIN, Formed, Join
from p2ptrain.averaging.protocol.ballots import Ballots
from p2ptrain.averaging.protocol.certificate import (
    CALL_TIMEOUT_SECONDS,
    CHAIN,
    AskChain,
    Body,
    Certificate,
    Chain,
    Roster,
)
from p2ptrain.averaging.protocol.table import ESTABLISHED, MAX_COUNT, MOST_VIEWS
from p2ptrain.averaging.verification.opening import TWO_VOTES, verify_evidence
from p2ptrain.errors import NotAdmittedError
from p2ptrain.network.admission import OpenGate
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.records import record_of
from tests.support.sim.clubs import WAIT_SECONDS, Club, announce, ask_for_votes, established, refuses, save, tell_seed
from tests.support.sim.strangers import forge, go_on_from
from tests.support.sim.trainers import SimulatedTrainer

# --- strangers ----------------------------------------------------------------------------------------------------


@pytest.mark.fault(36, 41)
@pytest.mark.parametrize("way", ["replay", "download"])
@pytest.mark.parametrize("is_reduced", [False, True])
@simulated(seed=1)
async def test_a_stranger_that_certifies_its_own_rounds_moves_nobody(
    network: SimulatedNetwork, way: str, is_reduced: bool
) -> None:
    club, honest = await established(network)
    evil = await club.start("evil")
    assert evil.sync.head == honest[0].sync.head
    evil.sync.participate(False)
    if way == "download":  # There is no chain from the others' head.
        await club.average(*honest)
    for _ in range(8):
        go_on_from(evil, forge(evil, is_reduced=is_reduced))
    if not is_reduced:
        assert evil.sync.head.outranks(honest[0].sync.head)
    await announce(evil, *honest)
    for each in honest:
        await refuses(each, evil)
    await club.average(*honest, rounds=3)
    assert len({each.sync.head.digest for each in honest}) == 1


@pytest.mark.fault(36)
@simulated(seed=2)
async def test_a_stranger_gets_no_votes_for_a_round_of_its_own(network: SimulatedNetwork) -> None:
    """Nobody has signed anything in this round yet, and a majority of its roster holds the result."""
    club, honest = await established(network)
    evil = await club.start("evil")
    voters = [club.seed.peer.peer_id, *(each.peer.peer_id for each in honest)]
    for view in (0, 60_000):  # No honest result has a later view than this.
        result = forge(evil, view=view)
        assert await ask_for_votes(evil, result.certificate, voters) == []
    await club.average(*honest)
    assert evil.peer.peer_id not in honest[0].sync.head.members


@pytest.mark.fault(36)
@simulated(seed=22)
async def test_a_stranger_whose_chain_never_comes_keeps_nobody_s_vote(network: SimulatedNetwork) -> None:
    """The seed asks for the chain to a result that it does not know, while others need its vote."""
    club = Club(network)
    honest = [await club.start(name) for name in "ab"]
    await club.average(*honest)
    evil = await club.start("evil")
    evil.sync.participate(False)
    go_on_from(evil, forge(evil))

    async def hang(peer: str, request: AskChain) -> Chain:
        return await asyncio.Event().wait()  # type: ignore[return-value]

    evil.rpc.serve(CHAIN, AskChain, hang)
    for each in honest:
        each._step()
    await asyncio.gather(*(each.synchronize() for each in honest))  # They try to follow it, once.
    asking = asyncio.create_task(ask_for_votes(evil, forge(evil).certificate, [club.seed.peer.peer_id]))
    await asyncio.sleep(1.0)
    began = network.loop.time()
    await club.average(*honest)
    assert network.loop.time() - began < CALL_TIMEOUT_SECONDS / 4
    assert not asking.done()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.fault(36)
@pytest.mark.parametrize("mode", ["open", "invite"])
@simulated(seed=23)
async def test_a_stranger_that_names_another_state_keeps_nobody_s_vote(network: SimulatedNetwork, mode: str) -> None:
    """It asks the seed first, before an honest peer has told the seed of the round."""
    club = Club(network, mode)
    honest = [await club.start(name) for name in "ab"]
    await club.average(*honest)
    evil = await club.start("evil")
    evil.sync.participate(False)
    right = evil.sync.head
    evil.state.head = replace(right, digest=b"x" * 32)
    false = forge(evil)
    assert false.certificate.body.digest == b"x" * 32
    assert await ask_for_votes(evil, false.certificate, [club.seed.peer.peer_id]) == []
    evil.state.head = right
    began = network.loop.time()
    await club.average(*honest)
    assert network.loop.time() - began < WAIT_SECONDS / 2


@pytest.mark.fault(36)
@simulated(seed=3)
async def test_one_member_of_four_gets_no_votes_for_a_round_of_its_own(network: SimulatedNetwork) -> None:
    club, (*honest, evil) = await established(network, "abcd")
    voters = [club.seed.peer.peer_id, *(each.peer.peer_id for each in honest)]
    assert await ask_for_votes(evil, forge(evil).certificate, voters) == []
    await club.average(*honest, evil)


@pytest.mark.fault(36, 41)
@pytest.mark.parametrize("is_reduced", [False, True])
@simulated(seed=4)
async def test_a_newcomer_follows_no_chain_without_the_founders_votes(
    network: SimulatedNetwork, is_reduced: bool
) -> None:
    club = Club(network)
    evil = await club.start("evil", joins=False)
    newcomer = await club.start("newcomer", joins=False)
    for _ in range(5):
        go_on_from(evil, forge(evil, is_reduced=is_reduced))
    await announce(evil, newcomer)
    await refuses(newcomer, evil)
    assert newcomer.sync.head.round == 0


# --- the beginning --------------------------------------------------------------------------------------------------


@pytest.mark.fault(36)
@pytest.mark.parametrize("mode", ["open", "invite"])
@simulated(seed=31)
async def test_a_hostile_first_peer_does_not_begin_the_swarm_alone_while_others_are_there(
    network: SimulatedNetwork, mode: str
) -> None:
    club = Club(network, mode)
    evil = await club.start("evil", joins=False)
    honest = await asyncio.gather(*(club.start(name) for name in "abcd"))
    tell_seed(club, evil, *honest)
    alone = forge(evil)
    assert await ask_for_votes(evil, alone.certificate, [club.seed.peer.peer_id]) == []
    began = network.loop.time()
    await club.average(*honest)
    assert network.loop.time() - began < WAIT_SECONDS
    table = honest[0].sync.head.table
    assert table.leading == {each.peer.peer_id for each in honest}
    assert await ask_for_votes(evil, alone.certificate, [club.seed.peer.peer_id]) == []
    await asyncio.sleep(WAIT_SECONDS)
    assert await ask_for_votes(evil, alone.certificate, [club.seed.peer.peer_id]) == []
    await club.average(*honest)


@pytest.mark.parametrize("mode", ["open", "invite"])
@simulated(seed=32)
async def test_a_lone_first_peer_waits_once_for_others_whose_records_are_there(
    network: SimulatedNetwork, mode: str
) -> None:
    club = Club(network, mode)
    alone = await club.start("alone")
    for name in ("ghost", "other ghost"):
        club.seed.membership.update(record_of(name), 1, expires_at=math.inf)
    began = network.loop.time()
    while not alone.sync.head.round and network.loop.time() - began < 4 * WAIT_SECONDS:
        alone._step()
        await alone.synchronize()
    assert WAIT_SECONDS <= network.loop.time() - began < 2.5 * WAIT_SECONDS
    assert "most of the trainers that this peer knows are not on the first roster" in alone.results[0].reason
    began = network.loop.time()
    await club.average(alone)
    assert network.loop.time() - began < WAIT_SECONDS


# --- two rosters ----------------------------------------------------------------------------------------------------


async def show_two_rosters(evil: SimulatedTrainer, *halves: Sequence[SimulatedTrainer]) -> set[bytes]:
    """Make a leader show each half of the others its own roster, and vote for both; return the certified results."""
    honest, tickets, rosters = [each for half in halves for each in half], dict[str, Join](), list[Roster]()
    head = evil.sync.head
    ready = asyncio.Event()
    evil.is_hostile = True

    async def join(channel: Channel, request: Join) -> None:
        tickets.setdefault(channel.remote, request)
        if len(tickets) == len(honest) and not rosters:
            form()
        await asyncio.wait_for(ready.wait(), 30)
        if request.ticket != tickets[channel.remote].ticket:
            await asyncio.sleep(3600)
        await channel.send(next(Formed(r.tickets) for r in rosters if channel.remote in r.members))

    def form() -> None:
        for half in halves:
            own = evil.sync.averager
            mine = own._signed(own._ticket(head, 10, 1, 0))
            theirs = [tickets[each.peer.peer_id].ticket for each in half]
            members = tuple(sorted([mine, *theirs], key=lambda ticket: ticket.peer))
            rosters.append(Roster(members, leader=evil.peer.peer_id))
        ready.set()

    evil.rpc.serve_channel(JOIN, Join, join)
    ballots = evil.sync.replica.context.ballots
    ballots.vote = lambda *_, **__: True  # type: ignore[method-assign]
    for each in honest:
        leaders = each.sync.averager.matchmaker.leaders
        leaders.candidates = lambda key, excluded: [evil.peer.peer_id]  # type: ignore[method-assign]
        each._step()
    trying = [each.peer.spawn(each.synchronize()) for each in honest]
    await asyncio.wait_for(ready.wait(), 30)
    for each in honest:
        vars(each.sync.averager.matchmaker.leaders).pop("candidates")
    runner, vector = evil.sync.averager._runner, evil.state.vector.clone()
    hostile = [asyncio.create_task(runner.run(runner.prepare(roster, head, vector, None))) for roster in rosters]
    await asyncio.wait([*trying, *hostile], timeout=60)
    found = set()
    for each in (*honest, evil):
        for attempt in each.sync.averager.round_log.attempts.values():
            certificate = attempt.certificate()
            if certificate is not None and attempt.head == head:
                found.add(certificate.body.body_hash)
    for task in (*trying, *hostile):
        task.cancel()
    await asyncio.gather(*trying, *hostile, return_exceptions=True)
    assert len(rosters) == 2
    return found


@pytest.mark.fault(36)
@simulated(seed=5)
async def test_a_leader_that_shows_two_rosters_to_two_halves_gets_one_certificate_at_most(
    network: SimulatedNetwork,
) -> None:
    """Of four voters; the hostile one signs both results, and the seed votes for what most of a roster signed."""
    _, (a, b, evil) = await established(network, "abd")
    assert len(await show_two_rosters(evil, [a], [b])) == 1


@pytest.mark.fault(36)
@pytest.mark.parametrize("seed", range(12))
@simulated()
async def test_a_voter_that_votes_for_two_results_of_one_view_is_convicted_by_everybody(
    network: SimulatedNetwork, seed: int
) -> None:
    """A member sees the other half's votes when it is asked for its own; nobody asks for evidence."""
    dice = random.Random(seed)
    names, spot_checks = dice.choice(["abd", "abcd", "abcde"]), dice.choice([0, 3])
    club, (*honest, evil) = await established(network, names, spot_checks=spot_checks)
    half = len(honest) // 2
    await show_two_rosters(evil, honest[:half], honest[half:])
    evil.sync.participate(False)
    await club.average(*honest, rounds=2)
    accused = evil.peer.peer_id
    for each in honest:
        convicted = each.sync.averager.evidence.convicted
        assert list(convicted) == [accused]
        found = verify_evidence(convicted[accused], each.swarm, each.sync.averager.round_log.rules_of, each.peer.signer)
        assert found == (accused, TWO_VOTES)
        assert accused in each.membership.avoided()


@pytest.mark.fault(36)
@pytest.mark.parametrize("seed", range(3))
@simulated()
async def test_who_is_banned_is_known_without_evidence_and_told_so(network: SimulatedNetwork, seed: int) -> None:
    """A member that restarts from its checkpoint, and a newcomer, know by the lineage alone."""
    club, (*honest, evil) = await established(network, "abcd")
    await show_two_rosters(evil, honest[:1], honest[1:])
    evil.sync.participate(False)
    for _ in range(4):
        await club.average(*honest)
        for each in honest:
            await announce(each, *honest)
    accused = evil.peer.peer_id
    for each in honest:
        assert each.sync.head.table.banned == {accused}
        assert accused not in each.sync.head.table.electorate
    network.crash(honest[0].peer)
    honest[0] = await club.restart(honest[0], save(honest[0]))
    new = await club.start("new")
    for each in (honest[0], new):
        assert not each.sync.averager.evidence.convicted
        assert each.membership.is_convicted(accused)
    await club.average(*honest, new, rounds=2)
    assert await evil.sync.catch_up.follow(honest[1].peer.peer_id, evil.work)
    evil._step()
    with pytest.raises(NotAdmittedError, match="banned this peer's key"):
        await evil.synchronize()


@pytest.mark.fault(36)
@simulated(seed=33)
async def test_a_voter_confirms_no_certificate_that_excludes_its_own_vote(network: SimulatedNetwork) -> None:
    """The others voted for another result, which the seed heard of when it was asked for the round after it."""
    club, (a, b, c) = await established(network)
    seed = [club.seed.peer.peer_id]
    first, second = forge(a, b, c), forge(a, b, c, tokens=7)
    assert second.certificate.body.excludes(first.certificate.body)
    assert await ask_for_votes(a, first.certificate, seed)
    for each in (a, b, c):
        go_on_from(each, second)
    assert await ask_for_votes(b, forge(a, b, c).certificate, seed), "it follows the certificate"
    assert not await ask_for_votes(b, second.certificate, seed)
    third = forge(a, b, c)
    for each in (a, b, c):
        go_on_from(each, third)
    assert await ask_for_votes(b, forge(a, b, c).certificate, seed)
    assert await ask_for_votes(b, third.certificate, seed), "it did not vote in that round"
    assert not club.seed.ballots[club.manifest.digest].vote(replace(third.certificate.body, group_id=bytes(32)))


@pytest.mark.fault(36)
@simulated(seed=6)
async def test_a_member_that_claims_many_attempts_ends_no_round_for_the_others(network: SimulatedNetwork) -> None:
    """In one attempt with it another member votes. Without that member's next vote, the rest are no quorum."""
    club, (a, b, c, evil) = await established(network, "abcd")
    false, true, voted = evil.sync.replica.context.ballots, a.sync.replica.context.ballots, asyncio.Event()
    false.next_view = lambda lineage, round_: MAX_COUNT  # type: ignore[method-assign]
    false.vote = lambda *_, **__: False  # type: ignore[method-assign]

    def vote(body: Body) -> bool:
        voted.set()
        return Ballots.vote(true, body)

    true.vote = vote  # type: ignore[method-assign, assignment]
    for each in (a, evil):
        each._step()
    trying = [each.peer.spawn(each.synchronize()) for each in (a, evil)]
    await asyncio.wait_for(voted.wait(), WAIT_SECONDS)
    assert true.next_view(a.sync.head.lineage, a.sync.head.round) == 1 + MOST_VIEWS
    network.crash(evil.peer)
    await club.average(b, c)
    await asyncio.wait(trying)
    assert len({each.sync.head for each in (a, b, c)}) == 1
    assert not a.sync.head.is_reduced


@simulated(seed=9)
async def test_who_was_a_suspect_for_its_reduced_rounds_is_none_for_whom_it_leads_on(network: SimulatedNetwork) -> None:
    """A member with a full head waits before it follows. There it finds no other leader."""
    club, (a, b, _) = await established(network)
    go_on_from(b, forge(b, is_reduced=True))
    assert not await a.sync.catch_up.follow(b.peer.peer_id, a.work)
    assert a.membership.is_suspect(b.peer.peer_id)
    a.sync.position.standstill = club.manifest.averaging.matchmaking_seconds
    assert await a.sync.catch_up.follow(b.peer.peer_id, a.work)
    assert a.sync.head == b.sync.head
    assert not a.membership.is_suspect(b.peer.peer_id)


@pytest.mark.parametrize("names", ["ab", "abc"])
@simulated(seed=8)
async def test_a_member_that_voted_alone_many_times_holds_up_no_round(network: SimulatedNetwork, names: str) -> None:
    """The seed refused its first rosters, for example: others were on the way."""
    club = Club(network, "invite")
    trainers = [await club.start(name) for name in names]
    ballots = trainers[0].sync.replica.context.ballots
    for view in range(6):
        assert ballots.vote(forge(trainers[0], view=view).certificate.body)
    began = network.loop.time()
    await club.average(*trainers)
    assert network.loop.time() - began < club.manifest.averaging.round_seconds, "an attempt that it could not sign"


@simulated(seed=7)
async def test_a_member_claims_the_views_that_it_voted_in_before_it_restarted(
    network: SimulatedNetwork, tmp_path: Path
) -> None:
    club = Club(network)
    a = await club.start("a", scratch=tmp_path)
    await club.average(a)
    saved = save(a)
    assert a.sync.replica.context.ballots.vote(forge(a, view=3).certificate.body)
    network.crash(a.peer)
    averager = (await club.restart(a, saved)).sync.averager
    assert averager._signed(averager._ticket(averager.head, 10, 1, 0)).view == 4


class GuestList(OpenGate):
    """Lets these peers in, some of them with so many tokens at most."""

    def __init__(self, names: Collection[str], **caps: float) -> None:
        self.names = names
        self.caps = caps

    def admitted(self, peer: str, credential: bytes = b"", *, contributes: bool = True) -> str:
        return "" if peer in self.names else "it is not on the list"

    def cap(self, peer: str) -> float:
        return self.caps.get(peer, math.inf)


@pytest.mark.fault(37)
@simulated(seed=6)
async def test_no_member_takes_part_with_a_stranger_that_its_leader_lets_in(
    network: SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    club, (honest, other, evil) = await established(network, "abd")
    stranger = await club.start("stranger")
    suspicions, suspect = [], honest.membership.suspect

    def note(peer: str, reason: str) -> None:
        suspicions.append((peer, reason.rpartition(": ")[2]))
        suspect(peer, reason)

    async def join(channel: Channel, request: Join) -> None:
        theirs = [each.sync.averager for each in (evil, stranger)]
        mine = [averager._signed(averager._ticket(evil.sync.head, 10, 1, 0)) for averager in theirs]
        await channel.send(Formed(tuple(sorted([*mine, request.ticket], key=lambda ticket: ticket.peer))))

    evil.rpc.serve_channel(JOIN, Join, join)
    monkeypatch.setattr(honest.membership, "suspect", note)
    invited = {club.seed.peer.peer_id, *(each.peer.peer_id for each in (honest, other, evil))}
    for each in (honest, other):
        each.rpc.gate = GuestList(invited)
        leaders = each.sync.averager.matchmaker.leaders
        monkeypatch.setattr(leaders, "candidates", lambda key, excluded: [evil.peer.peer_id])
    honest._step()
    other._step()
    await asyncio.gather(honest.synchronize(), other.synchronize())
    assert (evil.peer.peer_id, "it is not on the list") in suspicions
    monkeypatch.undo()
    await club.average(honest, other)
    assert stranger.peer.peer_id not in honest.sync.head.members


@simulated(seed=7)
async def test_a_contribution_weighs_no_more_than_its_peers_pass_allows(network: SimulatedNetwork) -> None:
    club, (honest, other, capped) = await established(network, "abd")
    everybody = {club.seed.peer.peer_id, *(each.peer.peer_id for each in (honest, other, capped))}
    before = honest.sync.head.tokens
    await club.average(honest, other, capped)
    assert (full := honest.sync.head.tokens - before) > 3
    for each in (honest, other, capped):
        each.rpc.gate = GuestList(everybody, **{capped.peer.peer_id: 1})
    await club.average(honest, other, capped)
    certificate = honest.sync.head.certificate
    body = Certificate.from_bytes(certificate, club.manifest.digest, honest.peer.signer).body
    tokens = dict(zip(body.contributing, (each[1] for each in body.contributors), strict=True))
    assert tokens.pop(capped.peer.peer_id) == 1
    assert set(tokens.values()) == {full // 3}


# --- reduced rounds ---------------------------------------------------------------------------------------------------


@pytest.mark.fault(2)
@pytest.mark.parametrize("way", ["replay", "download"])
@simulated(seed=8)
async def test_a_reduced_child_that_is_shown_to_a_live_swarm_moves_nobody(network: SimulatedNetwork, way: str) -> None:
    """One member that says that it waited may close a round alone; the others did not wait."""
    club, trainers = await established(network)
    alone, *others = trainers
    alone.sync.participate(False)
    for _ in range(3):
        go_on_from(alone, forge(alone, is_reduced=True))
    if way == "download":
        await club.average(*others)
    await announce(alone, *others)
    for each in others:
        before = each.sync.head
        assert not await each.sync.follow_swarm(each.work)
        assert not await each.sync.catch_up.follow(alone.peer.peer_id, each.work)
        assert each.sync.head == before
    await club.average(*others, rounds=2)
    assert not others[0].sync.head.is_reduced
    await announce(others[0], alone)
    assert await alone.sync.follow_swarm(alone.work), "it comes back"
    assert alone.sync.head == others[0].sync.head


@pytest.mark.fault(2)
@pytest.mark.parametrize("names", ["abcd", "abc"])
@simulated(seed=24)
async def test_a_member_that_comes_back_follows_those_at_once_without_whom_no_full_round_is_possible(
    network: SimulatedNetwork, names: str
) -> None:
    """Two of five voters are more than a third; one of four may be alone with its fault."""
    club, trainers = await established(network, names)
    (back, gone), there = trainers[-2:], trainers[:-2]
    saved = save(back)
    for each in (back, gone):
        network.crash(each.peer)
    await club.average(*there, rounds=2)
    assert there[0].sync.head.is_reduced
    for each in there:
        await announce(each)
    began = network.loop.time()
    returned = await club.restart(back, saved)
    waited = network.loop.time() - began
    if len(there) > 1:
        assert returned.sync.head == there[0].sync.head
        assert waited < WAIT_SECONDS / 4
    else:
        assert returned.sync.head == saved[0]
        assert waited >= WAIT_SECONDS
    await club.average(*there, returned, rounds=3)
    assert min(each.sync.head.full for each in (*there, returned)) > saved[0].full, "together they are enough again"


@pytest.mark.fault(2, 36)
@pytest.mark.parametrize("names_another", [True, False])
@simulated(seed=25)
async def test_a_liar_s_record_leads_no_member_that_comes_back_away(
    network: SimulatedNetwork, names_another: bool
) -> None:
    """It announces that all voters went on with it, and shows rounds that it signed alone."""
    club, trainers = await established(network)
    liar, back, *others = trainers
    saved = save(back)
    network.crash(back.peer)
    liar.sync.participate(False)
    go_on_from(liar, forge(liar, is_reduced=True))
    go_on_from(liar, forge(liar, *others[: 2 * names_another], is_reduced=True, signers=[liar]))
    liar.sync.replica.state.head = replace(liar.sync.head, returned=4)
    await announce(liar)
    returned = await club.restart(back, saved)
    assert returned.sync.head == saved[0]
    await announce(others[0], returned)
    assert not await returned.sync.follow_swarm(returned.work)
    await club.average(returned, *others)
    assert not returned.sync.head.is_reduced


# --- a voter's memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remembers", [True, False])
@simulated(seed=9)
async def test_a_voter_that_is_killed_after_its_vote_votes_for_no_other_result_of_that_view(
    network: SimulatedNetwork, tmp_path: Path, remembers: bool
) -> None:
    club = Club(network)
    a, b = await asyncio.gather(*(club.start(name) for name in "ab"))
    c = await club.start("c", scratch=tmp_path)
    await club.average(a, b, c, rounds=1 + ESTABLISHED)
    asker, before = a, a.sync.head
    voted = forge(a, b, tokens=10)
    assert await ask_for_votes(asker, voted.certificate, [c.peer.peer_id])
    network.crash(c.peer)
    if not remembers:
        ballots_in(tmp_path, c.swarm)._path.unlink()  # type: ignore[union-attr]
    back = (await club.restart(c)).peer.peer_id
    assert a.sync.head == before
    other = forge(a, b, tokens=11)
    assert other.certificate.body.view == voted.certificate.body.view
    assert bool(await ask_for_votes(asker, other.certificate, [back])) != remembers
    if remembers:
        assert await ask_for_votes(asker, voted.certificate, [back]), "the same one again"
        later = forge(a, b, tokens=11, view=1)
        assert await ask_for_votes(asker, later.certificate, [back]), "most of the roster gave it up"


@simulated(seed=23)
async def test_a_member_that_slept_through_its_round_suspects_nobody_that_answers(network: SimulatedNetwork) -> None:
    """They gave the attempt up, so all of it is late here; alone with its suspicion, it would end the round again."""
    club = Club(network)
    a, b, c = await asyncio.gather(*(club.start(name) for name in "abc"))
    await club.average(a, b, c)
    suspects = list[list[str]]()

    def on_phase(phase: str, round: int) -> None:
        if phase == "matchmaking":
            suspects.append(c.membership.suspects())
        elif phase == "reduce":
            network.stall(c.peer)

    c.sync.averager.phase_listeners = [on_phase]
    for each in (a, b, c):
        each._step()
    sleeping = c.peer.spawn(c.synchronize())
    await asyncio.gather(*(each.peer.spawn(each.synchronize()) for each in (a, b)))
    assert a.sync.head == b.sync.head != c.sync.head
    await asyncio.sleep(club.manifest.averaging.round_seconds)
    network.resume(c.peer)
    await sleeping
    assert c.sync.head.lineage == a.sync.head.lineage
    assert len(suspects) > 1
    assert suspects == [[]] * len(suspects)


@simulated(seed=21)
async def test_a_swarm_whose_state_is_gone_for_good_begins_again_and_no_earlier(network: SimulatedNetwork) -> None:
    """The only trainer is gone with its files; its seed is still there, and has voted on later rounds."""
    club = Club(network)
    gone = await club.start("gone")
    await club.average(gone, rounds=1 + ESTABLISHED)
    network.crash(gone.peer)
    newcomer = await club.start("new", joins=False)
    newcomer._step()
    await newcomer.synchronize()
    assert newcomer.sync.head.round == 0, "the one that is gone may only be away"
    loop = asyncio.get_running_loop()
    began, wait = loop.time(), WAITS_BEFORE_FOUNDING * WAIT_SECONDS
    while loop.time() - began < 0.7 * wait:
        newcomer._step()
        await newcomer.synchronize()
        assert newcomer.sync.head.round == 0
    await asyncio.sleep(0.3 * wait)
    await club.average(newcomer, rounds=2 + ESTABLISHED)
    assert newcomer.sync.head.table.electorate == {club.seed.peer.peer_id, newcomer.peer.peer_id}
