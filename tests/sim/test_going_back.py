"""Swarms whose newest state is lost go on from an older one with their founders' votes: at once, or after a wait."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from p2ptrain.averaging.commit.lost_state import (
    HELD,
    WAITS_BEFORE_GOING_BACK,
    WAITS_FOR_A_HOLDER,
    AskHeld,
    Held,
)
from p2ptrain.averaging.commit.round_log import Result
from p2ptrain.averaging.commit.votes import VOTE, AskVote, Vote
from p2ptrain.averaging.grouping.matchmaker import LONGEST_RETRY_SECONDS
from p2ptrain.averaging.protocol.ballots import Ballots
from p2ptrain.averaging.protocol.certificate import Certificate, Head
from p2ptrain.averaging.protocol.table import ESTABLISHED
from p2ptrain.errors import PeerRefusedError
from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import at_end, simulated
from tests.support.records import record_of
from tests.support.sim.clubs import WAIT_SECONDS, Club, Saved, ask_for_votes, established, save, train
from tests.support.sim.peers import until
from tests.support.sim.strangers import forge, go_on_from
from tests.support.sim.trainers import SimulatedTrainer

WAIT = WAITS_BEFORE_GOING_BACK * WAIT_SECONDS
refusals = dict[str, str]()
"""The seed's last refusal, by the trainer that asked it."""


async def trained(
    network: SimulatedNetwork, mode: str, names: str, **averaging: object
) -> tuple[Club, list[SimulatedTrainer], list[Saved]]:
    """Return a swarm that cannot close a full round without the seed, and checkpoints of four rounds ago."""
    club = Club(network, mode, **averaging)
    trainers = list(await asyncio.gather(*(club.start(name) for name in names)))
    await club.average(*trainers, rounds=1 + ESTABLISHED)
    saved = [save(each) for each in trainers]
    await club.average(*trainers, rounds=4)
    return club, trainers, saved


def train_on(*trainers: SimulatedTrainer) -> None:
    for each in trainers:
        training = each.peer.spawn(train(each))

        async def end(training: asyncio.Task[None] = training) -> None:
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)

        at_end(end)


async def until_full(trainers: Sequence[SimulatedTrainer], full: int, seconds: float) -> None:
    """Wait until all have gone on by full rounds, on one lineage."""
    await until(lambda: min(each.sync.head.full for each in trainers) > full, seconds, 1.0)
    for each in trainers:
        each.stop = True
    await asyncio.sleep(WAIT_SECONDS)
    heads = {each.sync.head.lineage for each in trainers if not each.sync.head.is_reduced}
    assert len(heads) == 1


async def ask(trainer: SimulatedTrainer, club: Club, certificate: Certificate, head: Head | None = None) -> bool:
    """Ask the seed for a vote on a certificate after a trainer's head; True if it votes."""
    request = AskVote(certificate.to_bytes(), head or trainer.sync.head)
    try:
        await trainer.rpc.call(club.seed.peer.peer_id, VOTE, request, Vote, 5.0)
    except PeerRefusedError as error:
        refusals[trainer.peer.peer_id] = error.reason
        return False
    return True


async def certify(club: Club, *trainers: SimulatedTrainer) -> Result:
    """Return a full round of these trainers after their head, with the seed's vote."""
    result = forge(*trainers)
    proofs = await ask_for_votes(trainers[0], result.certificate, [club.seed.peer.peer_id])
    return replace(
        result, certificate=replace(result.certificate, proofs=tuple(sorted((*result.certificate.proofs, *proofs))))
    )


def refusal_of(trainer: SimulatedTrainer) -> str:
    return refusals.get(trainer.peer.peer_id, "")


async def waits_until_asked(trainer: SimulatedTrainer, club: Club, certificate: Certificate, most: int) -> int:
    """Ask the seed once in each wait; return how many waits pass until it votes."""
    for waits in range(most):
        if await ask(trainer, club, certificate):
            return waits
        await asyncio.sleep(WAIT_SECONDS)
    raise AssertionError(f"the seed still says: {refusal_of(trainer)}")


# --- at once --------------------------------------------------------------------------------------------------------


@pytest.mark.fault(11)
@pytest.mark.parametrize(("mode", "names"), [("open", "abc"), ("open", "a"), ("invite", "a")])
@simulated(seed=[1, 101, 102])
async def test_a_swarm_that_restarts_from_older_checkpoints_goes_on_at_once(
    network: SimulatedNetwork, caplog: pytest.LogCaptureFixture, mode: str, names: str
) -> None:
    """All that could hold a later state answer, and hold none."""
    club, trainers, saved = await trained(network, mode, names)
    lost = trainers[0].sync.head
    again = await club.restart_all(trainers, saved)
    train_on(*again)
    await until(lambda: min(each.sync.head.full for each in again) > saved[0][0].full, WAIT_SECONDS, 1.0)
    assert f"no peer shows the state of round {lost.round - 1}: this voter lets the swarm go on" in caplog.text
    await until_full(again, saved[0][0].full + 1, WAIT)


@simulated(seed=21)
async def test_a_swarm_whose_members_all_left_in_order_begins_again_at_once(network: SimulatedNetwork) -> None:
    club = Club(network, "open")
    leaver = await club.start("leaver")
    await club.average(leaver, rounds=3)
    leaver.sync.last_round = leaver.sync.head.round + 1
    await club.average(leaver)
    network.crash(leaver.peer)
    newcomer = await club.start("newcomer", joins=False)
    train_on(newcomer)
    taken = await until(lambda: newcomer.sync.head.full > 1, WAIT, 1.0)
    assert taken <= WAIT_SECONDS, "the seed waits for no member that might hold a later state"


@simulated(seed=22)
async def test_a_member_that_was_not_on_the_last_roster_may_hold_the_state(network: SimulatedNetwork) -> None:
    club, trainers, _ = await trained(network, "open", "abc")
    *pair, away = trainers
    saved = [save(each) for each in pair]
    network.cut(away.peer)
    await club.average(*pair, rounds=2)
    tip = club.seed.ballots[club.manifest.digest].tip
    assert tip is not None
    assert away.peer.peer_id not in tip.members
    network.crash(away.peer)
    again = await club.restart_all(pair, saved)
    forged = forge(*again, view=1).certificate
    assert not await ask(again[0], club, forged)
    assert "for 180 s more" in refusal_of(again[0])


@simulated(seed=31)
async def test_a_member_that_may_still_restore_its_checkpoint_denies_nothing(network: SimulatedNetwork) -> None:
    club, trainers, saved = await trained(network, "open", "ab")
    for each in trainers:
        network.crash(each.peer)
    again = await club.restart(trainers[0], saved[0])
    await club.restart(trainers[1])
    assert not await ask(again, club, forge(again, view=1).certificate)
    assert "for 180 s more" in refusal_of(again)


@simulated(seed=23)
async def test_attempts_that_nobody_is_to_blame_for_pause_ever_longer(
    network: SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    club, (a, b), saved = await trained(network, "open", "ab")
    network.crash(b.peer)
    (again,) = await club.restart_all([a], saved[:1])
    train_on(again)
    await asyncio.sleep(WAIT_SECONDS)
    before = again.sync.position.attempts
    await asyncio.sleep(WAIT_SECONDS)
    assert 1 <= again.sync.position.attempts - before <= WAIT_SECONDS / LONGEST_RETRY_SECONDS + 1


# --- after a wait ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["open", "invite"])
@simulated(seed=1)
async def test_a_swarm_that_restarts_from_older_checkpoints_waits_for_a_member_that_may_only_be_away(
    network: SimulatedNetwork, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    club, trainers, saved = await trained(network, mode, "ab")
    before = saved[0][0]
    network.crash(trainers[1].peer)
    again = await club.restart_all(trainers[:1], saved[:1])
    train_on(*again)
    await asyncio.sleep(0.9 * WAIT)
    assert [each.sync.head.full for each in again] == [before.full] * len(again), "a holder may only be away"
    assert "unless a peer shows it" in caplog.text
    await until_full(again, before.full, 0.2 * WAIT)


@simulated(seed=2)
async def test_the_founder_hears_of_it_when_the_swarm_has_gone_on_by_reduced_rounds(network: SimulatedNetwork) -> None:
    """Then no voter that the founder knows signed its head; and a newcomer believes it all the same."""
    club, trainers, saved = await trained(network, "invite", "a")
    network.cut(club.seed.peer)
    (again,) = await club.restart_all(trainers, saved)
    train_on(again)
    await until(lambda: again.sync.head.round > saved[0][0].round + 1, 10 * WAIT_SECONDS, 1.0)
    assert again.sync.head.is_reduced
    newcomer = await club.start("newcomer")
    assert await newcomer.sync.catch_up.follow(again.peer.peer_id, newcomer.work)
    network.mend(club.seed.peer)
    train_on(newcomer)
    await until_full([again, newcomer], again.sync.head.full + 1, 2 * WAIT)


@simulated(seed=3)
async def test_a_holder_that_comes_back_within_the_wait_keeps_its_rounds(network: SimulatedNetwork) -> None:
    club, (*trainers, holder), saved = await trained(network, "open", "abc")
    lost = holder.sync.head
    network.cut(holder.peer)
    again = await club.restart_all(trainers, saved[:-1])
    train_on(*again)
    await asyncio.sleep(0.7 * WAIT)
    assert [each.sync.head for each in again] == [head for head, _ in saved[:-1]]
    network.mend(holder.peer)
    train_on(holder)
    await until_full([*again, holder], lost.full, WAIT)
    assert holder.sync.catch_up.resyncs == 0
    assert holder.sync.averager.round_log.lineage_at(holder.sync.head, lost.round) == lost.lineage


@simulated(seed=4)
async def test_the_founder_waits_longer_for_a_holder_that_only_it_reaches(network: SimulatedNetwork) -> None:
    club, trainers, saved = await trained(network, "open", "ab")
    holder = trainers[1]
    network.cut(holder.peer)
    (again,) = await club.restart_all(trainers[:1], saved[:1])
    network.mend(holder.peer)
    forged = forge(again, view=1).certificate
    for _ in range(2 * WAITS_BEFORE_GOING_BACK):
        assert not await ask(again, club, forged)
        assert f"{holder.peer.peer_id[-8:]} says that it holds a later state" in refusal_of(again)
        await asyncio.sleep(WAIT_SECONDS)
    network.cut(holder.peer)
    assert await ask(again, club, forged), "it is not there any more"


@pytest.mark.parametrize("lie", ["a member's record", "a member's answer", "a stranger's record"])
@simulated(seed=24)
async def test_a_peer_that_lies_about_the_round_that_it_holds_does_not_stop_the_swarm(
    network: SimulatedNetwork, lie: str
) -> None:
    club, trainers, saved = await trained(network, "open", "ab")
    lost = trainers[1].sync.head
    again, liar = await club.restart_all(trainers, saved)
    peer = liar.peer.peer_id

    async def claim(peer: str, request: AskHeld) -> Held:
        return Held(lost)

    match lie:
        case "a member's answer":
            liar.rpc.serve(HELD, AskHeld, claim)
        case "a member's record":
            club.seed.membership.update(record_of(peer, round=lost.round, lineage_full=99), 1, expires_at=math.inf)
            network.crash(liar.peer)
        case _:
            club.seed.membership.update(record_of("stranger", lineage_full=99), 1, expires_at=math.inf)
    forged = forge(again, view=1).certificate
    waits = await waits_until_asked(again, club, forged, WAITS_FOR_A_HOLDER + 2)
    expected = WAITS_BEFORE_GOING_BACK if lie == "a stranger's record" else WAITS_FOR_A_HOLDER
    assert waits == expected


@simulated(seed=5)
async def test_time_in_which_the_founder_heard_nobody_does_not_count(network: SimulatedNetwork) -> None:
    """A holder may have asked meanwhile."""
    club, trainers, saved = await trained(network, "open", "ab")
    network.crash(trainers[1].peer)
    again = await club.restart_all(trainers[:1], saved[:1])
    train_on(*again)
    await asyncio.sleep(WAIT_SECONDS)
    network.cut(club.seed.peer)
    await asyncio.sleep(2 * WAIT)
    network.mend(club.seed.peer)
    await asyncio.sleep(0.4 * WAIT)
    assert again[0].sync.head == saved[0][0]


@simulated(seed=6)
async def test_nothing_goes_back_past_an_anchor(network: SimulatedNetwork, caplog: pytest.LogCaptureFixture) -> None:
    club, trainers, saved = await trained(network, "open", "ab", anchor_rounds=8)
    await club.average(*trainers)  # The founder signs once it sees the next certificate.
    assert saved[0][0].round < 8 < trainers[0].sync.head.round
    again = await club.restart_all(trainers, saved)
    train_on(*again)
    await asyncio.sleep(2 * WAIT)
    assert [each.sync.head for each in again] == [head for head, _ in saved]
    assert "If its state is lost, delete" in caplog.text


@simulated(seed=7)
async def test_old_voters_lead_no_founder_forward(network: SimulatedNetwork) -> None:
    """Theirs was the electorate of a round that the founder signed; it has changed since."""
    club, (evil, *staying) = await established(network, "abc")
    evil.sync.participate(False)
    young = [await club.start(name) for name in "de"]
    await club.average(*staying, *young, rounds=1 + ESTABLISHED)
    for each in staying:
        await each.peer.spawn(each.close())
    await club.average(*young, rounds=10)
    for _ in range(40):
        go_on_from(evil, forge(evil, *staying))
    assert evil.sync.head.outranks(young[0].sync.head)
    forged = AskVote(forge(evil, *staying).certificate.to_bytes(), evil.sync.head)
    for _ in range(WAITS_BEFORE_GOING_BACK + 2):
        with pytest.raises(PeerRefusedError, match="does not know the round before"):
            await evil.rpc.call(club.seed.peer.peer_id, VOTE, forged, Vote, 5.0)
        await asyncio.sleep(WAIT_SECONDS)


@simulated(seed=7)
async def test_a_voter_whose_own_state_is_older_than_its_votes_votes_again(
    network: SimulatedNetwork, tmp_path: Path
) -> None:
    """As voters in a tree, which are on no roster of the last level."""
    club = Club(network)
    trainers = [await club.start(name, scratch=tmp_path / name) for name in "abcd"]
    await club.average(*trainers, rounds=1 + ESTABLISHED)
    saved, name = [save(each) for each in trainers], trainers[-1].peer.peer_id
    await club.average(*trainers, rounds=2)
    assert await ask_for_votes(trainers[0], forge(*trainers[:-1]).certificate, [name]), (
        "it keeps its tip with this vote"
    )
    away = trainers.pop(2)
    network.crash(away.peer)
    del saved[2]
    a, b, _ = await club.restart_all(trainers, saved)
    earlier = forge(a, b, view=1).certificate
    for _ in range(WAITS_BEFORE_GOING_BACK):
        assert not await ask_for_votes(a, earlier, [name])
        await asyncio.sleep(WAIT_SECONDS)
    assert await ask_for_votes(a, earlier, [name])


# --- what a liar repeats ------------------------------------------------------------------------------------------


async def with_witness(
    network: SimulatedNetwork, mode: str, names: str
) -> tuple[Club, SimulatedTrainer, list[SimulatedTrainer], list[Saved]]:
    """Return `trained` and a stranger that follows the swarm, so that it has all certificates and the newest head."""
    club, trainers, saved = await trained(network, mode, names)
    stranger = await club.start("stranger", joins=False)
    assert await stranger.sync.catch_up.follow(trainers[0].peer.peer_id, None)
    assert stranger.sync.head == trainers[0].sync.head
    return club, stranger, trainers, saved


@simulated(seed=25)
async def test_repeated_requests_of_others_do_not_renew_the_wait(network: SimulatedNetwork) -> None:
    club, stranger, trainers, saved = await with_witness(network, "open", "ab")
    tip = club.seed.ballots[club.manifest.digest].tip
    assert tip is not None
    last = trainers[0].sync.averager.round_log.proofs(tip.lineage)[0]
    network.crash(trainers[1].peer)
    (again,) = await club.restart_all(trainers[:1], saved[:1])
    forged = forge(again, view=1).certificate
    for _ in range(WAITS_BEFORE_GOING_BACK):
        assert not await ask(again, club, forged)
        await asyncio.sleep(WAIT_SECONDS / 2)
        assert await ask(stranger, club, last, tip), "the last one that it voted for"
        assert not await ask(stranger, club, forge(stranger).certificate)
        await asyncio.sleep(WAIT_SECONDS / 2)
    assert await ask(again, club, forged)


@simulated(seed=26)
async def test_one_liar_does_not_lead_the_founder_back_to_a_lost_state(network: SimulatedNetwork) -> None:
    club, stranger, trainers, saved = await with_witness(network, "open", "abc")
    lost = stranger.sync.head
    again = await club.restart_all(trainers, saved)
    assert await ask(again[0], club, forge(*again, view=1).certificate)
    log = stranger.sync.averager.round_log
    log._certificates = trainers[0].sync.averager.round_log._certificates
    for head in (lost, again[0].sync.head, *log.heads(), replace(lost, lineage=bytes(32))):
        stranger.sync.averager.matchmaker.set_head(head)
        stranger.state.head = head
        assert not await ask(stranger, club, forge(stranger, tokens=11).certificate, head)
    assert club.seed.ballots[club.manifest.digest].tip == again[0].sync.head
    assert await ask(again[0], club, forge(*again, tokens=11, view=2).certificate)


@simulated(seed=27)
async def test_a_certificate_of_a_lost_result_does_not_stop_the_swarm(network: SimulatedNetwork) -> None:
    """A member keeps it, and its state is gone."""
    club, stranger, trainers, saved = await with_witness(network, "open", "ab")
    again, liar = await club.restart_all(trainers, saved)
    first = forge(again, liar, view=1)
    assert await ask(again, club, first.certificate)
    liar.sync.averager.round_log._certificates = stranger.sync.averager.round_log._certificates
    second = forge(again, tokens=11, view=2).certificate
    assert not await ask(again, club, second), "the other may hold the first one"
    await asyncio.sleep(WAIT_SECONDS)
    assert await ask(again, club, second)


@simulated(seed=28)
async def test_a_certificate_of_an_unknown_lost_result_stops_the_swarm_for_the_wait_alone(
    network: SimulatedNetwork,
) -> None:
    """Other voters signed it, and a member of a later roster shows it."""
    club, (a, b, c) = await established(network)
    evil = forge(a, b, c, signers=[a, b, c])
    await ask_for_votes(a, forge(b, c, tokens=11, view=1).certificate, [club.seed.peer.peer_id])
    go_on_from(c, evil)
    network.crash(b.peer)
    waits = await waits_until_asked(a, club, forge(a, b, tokens=12, view=2).certificate, 20)
    assert waits == 1 + WAITS_BEFORE_GOING_BACK, "the first one is for the roster"


@simulated(seed=29)
async def test_a_lost_state_that_comes_back_while_nothing_else_is_certified_wins(network: SimulatedNetwork) -> None:
    club, trainers, saved = await trained(network, "open", "ab")
    holder, ballots = trainers[1], club.seed.ballots[club.manifest.digest]
    lost = ballots.tip
    assert lost is not None
    network.cut(holder.peer)
    (again,) = await club.restart_all(trainers[:1], saved[:1])
    await waits_until_asked(again, club, forge(again, view=1).certificate, WAITS_BEFORE_GOING_BACK + 1)
    assert lost.lineage in ballots.lost
    network.mend(holder.peer)
    assert await ask(holder, club, forge(holder, tokens=11).certificate)
    assert ballots.tip == holder.sync.head
    assert not await ask(again, club, forge(again, tokens=12, view=2).certificate)
    assert await again.sync.catch_up.follow(holder.peer.peer_id, again.work)


@simulated(seed=30)
async def test_an_earlier_request_ages_no_wait_and_leads_no_founder_back(network: SimulatedNetwork) -> None:
    """A stranger shows the certificates of the swarm's rounds again, while all are down."""
    club, stranger, trainers, saved = await with_witness(network, "open", "ab")
    log, ballots = stranger.sync.averager.round_log, club.seed.ballots[club.manifest.digest]
    tip = ballots.tip
    for each in trainers:
        network.crash(each.peer)
    for _ in range(WAITS_BEFORE_GOING_BACK + 2):
        for head in log.heads()[2:]:
            for certificate in log.proofs(head.lineage)[:1]:
                await ask(stranger, club, certificate, head)
        await asyncio.sleep(WAIT_SECONDS)
    assert ballots.tip == tip
    (again,) = [await club.restart(trainers[0], saved[0])]
    assert not await ask(again, club, forge(again, view=1).certificate)
    assert "for 180 s more" in refusal_of(again)


# --- a second vote in one round -------------------------------------------------------------------------------------


@pytest.mark.fault(20)
@pytest.mark.parametrize("holder", ["there", "gone"])
@simulated(seed=8)
async def test_a_voter_votes_again_only_if_nobody_holds_what_it_voted_for(
    network: SimulatedNetwork, holder: str
) -> None:
    club, (a, b, c) = await established(network)
    seed = club.seed.peer.peer_id
    certified = await certify(club, a, b)
    body, signers = certified.certificate.body, certified.certificate.signers
    assert a.sync.head.table.why_invalid(body, signers) == ""
    second = forge(b, c, tokens=11, view=1).certificate
    go_on_from(a, certified)
    assert b.sync.head == c.sync.head != a.sync.head
    request = AskVote(second.to_bytes())
    with pytest.raises(PeerRefusedError, match="voted for another result"):
        await c.rpc.call(seed, VOTE, request, Vote, 5.0)
    await asyncio.sleep(WAIT_SECONDS)
    if holder == "gone":
        network.crash(a.peer)
        assert await ask_for_votes(c, second, [seed])
        return
    with pytest.raises(PeerRefusedError, match=f"{a.peer.peer_id[-8:]} holds another result"):
        await c.rpc.call(seed, VOTE, request, Vote, 5.0)
    network.crash(a.peer)
    assert await ask_for_votes(c, second, [seed]), "nobody tells of it any more"


@simulated(seed=32)
async def test_a_result_that_few_voters_signed_holds_up_no_vote(network: SimulatedNetwork) -> None:
    club, (a, b, c) = await established(network)
    first = forge(a, b)
    assert await ask_for_votes(a, first.certificate, [club.seed.peer.peer_id])
    reduced = forge(b, c, is_reduced=True)
    for each in (b, c):
        go_on_from(each, reduced)
    go_on_from(a, first)  # with the signatures of its roster alone
    assert await ask(b, club, forge(b, c).certificate)


@pytest.mark.fault(20)
@pytest.mark.parametrize("num_reduced", [1, 2])
@pytest.mark.parametrize("holder", ["there", "gone"])
@simulated(seed=31)
async def test_a_voter_leads_no_reduced_lineage_on_while_a_member_holds_what_it_voted_for(
    network: SimulatedNetwork, holder: str, num_reduced: int
) -> None:
    """The others do not hear of that member's full round, close reduced ones, and want a full one again."""
    club, (a, b, c) = await established(network)
    certified = await certify(club, a, b)
    for _ in range(num_reduced):
        reduced = forge(b, c, is_reduced=True)
        for each in (b, c):
            go_on_from(each, reduced)
        await ask(b, club, forge(b, c, is_reduced=True).certificate)  # It leads the seed's tip there.
    go_on_from(a, certified)
    assert a.sync.head.outranks(b.sync.head)
    if holder == "gone":
        network.crash(a.peer)
        assert await ask(b, club, forge(b, c).certificate)
        return
    assert not await ask(b, club, forge(b, c).certificate)
    assert f"{a.peer.peer_id[-8:]} holds another result" in refusal_of(b)
    assert await ask(a, club, forge(a, b, tokens=11).certificate), "its own goes on"


@simulated(seed=9)
async def test_a_hostile_pair_gets_no_second_certificate_while_an_honest_member_holds_the_first(
    network: SimulatedNetwork,
) -> None:
    """Most of the first roster signs a second result, as members do that gave the first one up."""
    club, (a, b, c) = await established(network)
    seed = club.seed.peer.peer_id
    first = forge(a, b, c)
    assert await ask(a, club, first.certificate)
    go_on_from(c, first)
    second = forge(a, b, tokens=11, view=1)
    assert not await ask(a, club, second.certificate)
    assert f"{c.peer.peer_id[-8:]} holds another result of this round" in refusal_of(a)
    assert await ask_for_votes(c, forge(a, b, c, tokens=10**9).certificate, [seed]), "its own goes on"


@simulated(seed=10)
async def test_a_crash_between_two_votes_leaves_the_second_one_and_what_it_gave_up(
    network: SimulatedNetwork, tmp_path: Path
) -> None:
    """Votes are on the disk before they are sent."""
    club, trainers, saved = await trained(network, "open", "ab")
    ballots = club.seed.ballots[club.manifest.digest]
    ballots._path = tmp_path / "votes"
    lost = ballots.tip
    again = await club.restart_all(trainers, saved)
    forged = forge(*again, view=1).certificate
    assert not await ask(again[0], club, forge(again[0], view=0).certificate), "never back to an earlier view"
    assert not (tmp_path / "votes").exists()
    await asyncio.sleep(WAIT_SECONDS)
    assert await ask(again[0], club, forged)
    read = Ballots(tmp_path / "votes")
    assert lost is not None
    assert lost.lineage in read.lost == ballots.lost
    assert read.tip == ballots.tip == again[0].sync.head
    assert read.has_voted_for(forged.body)
    assert not read.may_vote(forge(*again, tokens=11, view=1).certificate.body)
