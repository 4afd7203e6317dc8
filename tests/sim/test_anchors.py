"""Anchors: no stolen keys rewrite the past, contradictions stop peers, and a swarm does without."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from p2ptrain.averaging.commit.anchoring import ANCHORS, AskAnchors, HeldAnchors
from p2ptrain.averaging.grouping.coordinator import PATIENT_ROUNDS
from p2ptrain.averaging.protocol.anchors import Anchor, AnchorBook
from p2ptrain.averaging.protocol.certificate import CHAIN, AskChain, Chain, Head
from p2ptrain.errors import IntegrityError
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.training.sync.state_server import check_head
from tests.support.coroutines import simulated
from tests.support.sim.clubs import WAIT_SECONDS, Club, announce, ask_for_votes, established, refuses, save, train
from tests.support.sim.strangers import forge, go_on_from
from tests.support.sim.trainers import SimulatedTrainer

EVERY = 8
NEVER = 4096


def book_of(trainer: SimulatedTrainer) -> AnchorBook:
    return trainer.sync.replica.context.anchors


class Rewrite:
    """A swarm whose old voters have left, and whose keys sign another past later.

    Attributes:
        members: The present members; anchors of rounds 8 and 16 are behind them.
        evil: An old voter that holds the other lineage. It is longer, and parts before the first anchor.
        away: A member that has gone no further than the fork, where the old voters were its voters.
    """

    def __init__(
        self, club: Club, members: list[SimulatedTrainer], evil: SimulatedTrainer, away: SimulatedTrainer
    ) -> None:
        self.club, self.members, self.evil, self.away = club, members, evil, away


async def rewritten(
    network: SimulatedNetwork, every: int, scratch: Path | None = None, *, history_rounds: int = 4
) -> Rewrite:
    club, old = await established(network, "abc", anchor_rounds=every, history_rounds=history_rounds)
    evil, *staying = old
    evil.sync.participate(False)
    fork = evil.sync.head
    assert fork.round < EVERY
    young = [await club.start(name, scratch=scratch if name == "d" else None) for name in "def"]
    away = await club.start("away")
    away.sync.participate(False)
    assert all(each.sync.head == fork for each in young)
    await club.average(*staying, *young, rounds=6)
    for each in staying:
        await each.peer.spawn(each.close())
    await club.average(*young, rounds=10)
    names = {each.peer.peer_id for each in young}
    assert young[0].sync.head.table.electorate == {club.seed.peer.peer_id, *names}
    for _ in range(2 * EVERY + 20):
        go_on_from(evil, forge(evil, *staying))
    assert evil.sync.head.outranks(young[0].sync.head)
    return Rewrite(club, young, evil, away)


def knows_only(trainer: SimulatedTrainer, other: SimulatedTrainer) -> None:
    """Remove the records of all but one peer from a trainer's memory."""
    known = trainer.membership._known
    trainer.membership._known = {peer: each for peer, each in known.items() if peer == other.peer.peer_id}


async def refuses_as_anchored(victim: SimulatedTrainer, evil: SimulatedTrainer) -> None:
    await announce(evil, victim)
    await refuses(victim, evil)


@simulated(seed=1)
async def test_old_voters_keys_rewrite_nothing_before_an_anchor(network: SimulatedNetwork) -> None:
    """Neither for a member that was there at the fork, nor for a newcomer that meets both."""
    swarm = await rewritten(network, EVERY)
    evil, members = swarm.evil, swarm.members
    for each in members:
        assert book_of(each).round == 2 * EVERY
        await refuses_as_anchored(each, evil)
    newcomer = await swarm.club.start("newcomer", joins=False)
    await announce(evil, newcomer)
    await newcomer.sync.follow_swarm(newcomer.work)
    assert newcomer.sync.head == members[0].sync.head
    await swarm.club.average(*members, newcomer, rounds=2)
    assert newcomer.sync.head.lineage == members[0].sync.head.lineage


@pytest.mark.parametrize("way", ["replay", "download"])
@simulated(seed=1)
async def test_a_member_that_was_away_since_the_fork_goes_past_no_anchor_on_another_lineage(
    network: SimulatedNetwork, way: str
) -> None:
    swarm = await rewritten(network, EVERY, history_rounds=64 if way == "replay" else 4)
    evil, members, away = swarm.evil, swarm.members, swarm.away
    await announce(members[0], away)
    await away.sync.catch_up.anchors.look()
    await asyncio.sleep(2.0)
    assert book_of(away).round == 2 * EVERY
    await announce(evil, away)
    before = away.sync.head
    assert not await away.sync.catch_up.follow(evil.peer.peer_id, away.work)
    assert away.sync.head == before
    assert away.membership.is_mistrusted(evil.peer.peer_id)
    assert await away.sync.catch_up.follow(members[0].peer.peer_id, away.work)
    assert away.sync.head == members[0].sync.head


@simulated(seed=1)
async def test_without_anchors_old_voters_keys_rewrite_all(network: SimulatedNetwork) -> None:
    swarm = await rewritten(network, NEVER)
    evil, member = swarm.evil, swarm.members[0]
    newcomer = await swarm.club.start("newcomer", joins=False)
    await announce(evil, member, newcomer)
    for each in (member, newcomer):
        assert await each.sync.catch_up.follow(evil.peer.peer_id, each.work)
        assert each.sync.head == evil.sync.head


@simulated(seed=2)
async def test_a_restarted_peer_remembers_the_anchor(network: SimulatedNetwork, tmp_path: Path) -> None:
    """It has lost its state, and meets nobody but the old voters."""
    swarm = await rewritten(network, EVERY, tmp_path)
    evil, member = swarm.evil, swarm.members[0]
    for each in (*swarm.members, swarm.away):
        network.crash(each.peer)
    back = await swarm.club.restart(member)
    assert book_of(back).round == 2 * EVERY
    await refuses_as_anchored(back, evil)


@simulated(seed=3)
async def test_a_newcomer_that_met_liars_first_leaves_them_once_it_meets_the_anchor(network: SimulatedNetwork) -> None:
    swarm = await rewritten(network, EVERY)
    evil, members = swarm.evil, swarm.members
    network.crash(swarm.club.seed.peer)
    misled = await swarm.club.start("misled", joins=False)
    await announce(evil, misled)
    knows_only(misled, evil)
    assert await misled.sync.follow_swarm(misled.work)
    assert misled.sync.head == evil.sync.head
    await announce(members[0], misled)
    await misled.sync.follow_swarm(misled.work)
    await asyncio.sleep(6.0)
    assert await misled.sync.follow_swarm(misled.work)
    assert misled.sync.head == members[0].sync.head
    assert evil.sync.head.outranks(misled.sync.head)
    assert not book_of(misled).is_off
    await swarm.club.average(*members, misled)


@pytest.mark.fault(50)
@simulated(seed=4)
async def test_anchors_that_contradict_each_other_stop_both_sides(network: SimulatedNetwork) -> None:
    """The anchor key, in other hands, signs the other lineage, too."""
    swarm = await rewritten(network, EVERY)
    evil, members = swarm.evil, swarm.members
    book_of(evil).adopt(anchor_of(swarm, evil, 3 * EVERY), is_off=False)
    await announce(evil, *members)
    await announce(members[0], evil)
    for each in (*members, evil):
        await each.sync.follow_swarm(each.work)
    await asyncio.sleep(6.0)
    for each in (*members, evil):
        each._step()
        before = each.sync.head
        result = await each.sync.synchronize(each.work)
        assert result.paused
        assert "two anchors contradict each other" in result.reason
        assert each.sync.head == before


def anchor_of(swarm: Rewrite, trainer: SimulatedTrainer, round_: int) -> Anchor:
    """The seed's signature of a head on a trainer's lineage."""
    return signed(swarm.club, head_of(trainer, round_), trainer.swarm)


def head_of(trainer: SimulatedTrainer, round_: int) -> Head:
    return next(head for head in trainer.sync.averager.round_log.heads() if head.round == round_)


def signed(club: Club, head: Head, unit: bytes) -> Anchor:
    signer = club.seed.peer.signer
    return Anchor(head, ((signer.peer_id, signer.sign(Anchor(head, ()).statement(unit))),))


@simulated(seed=5)
async def test_training_goes_on_and_newcomers_come_while_no_anchor_key_is_up(network: SimulatedNetwork) -> None:
    club, trainers = await established(network, "abc", anchor_rounds=EVERY)
    await club.average(*trainers, rounds=EVERY)
    assert book_of(trainers[0]).round == EVERY
    network.crash(club.seed.peer)
    await club.average(*trainers)
    began = network.loop.time()
    await club.average(*trainers, rounds=2 * EVERY)
    assert network.loop.time() - began < WAIT_SECONDS
    assert book_of(trainers[0]).round == EVERY
    assert not trainers[0].sync.head.is_reduced
    newcomer = await club.start("newcomer")
    assert newcomer.sync.head.lineage == trainers[0].sync.head.lineage
    assert book_of(newcomer).round == EVERY
    await club.average(*trainers, newcomer)


async def with_keys(
    network: SimulatedNetwork, names: str, *others: str, quorum: int
) -> tuple[Club, list[SimulatedTrainer]]:
    """A club in which the seed, trainers of these names and others that are never there have the anchor keys."""
    club, peers = Club(network), [network.add_peer(name) for name in names]
    keys = (club.seed.peer.peer_id, *(peer.peer_id for peer in peers), *others)
    changes = {"anchors": keys, "anchor_quorum": quorum, "anchor_rounds": EVERY}
    spec = club.manifest.averaging.model_copy(update=changes)
    club.manifest = club.manifest.model_copy(update={"averaging": spec})
    await club.seed.peer.spawn(club.seed.serve(club.manifest.digest, spec))
    trainers = [await club._begin(peer, joins=True) for peer in peers]
    trainers.append(await club.start("without a key"))
    return club, trainers


@pytest.mark.parametrize("quorum", [2, 3])
@simulated(seed=5)
async def test_no_fewer_signatures_than_the_quorum_make_an_anchor(network: SimulatedNetwork, quorum: int) -> None:
    """The seed and a trainer sign; the third key is nobody's."""
    club, trainers = await with_keys(network, "a", "nobody", quorum=quorum)
    await club.average(*trainers, rounds=2 * EVERY + 4)
    for each in trainers:
        assert book_of(each).round == (2 * EVERY if quorum == 2 else 0)
        assert set(book_of(each)._by_key) == {*book_of(each).keys} - {"nobody"}


@simulated(seed=8)
async def test_keys_of_trainers_sign_while_the_seed_is_gone(network: SimulatedNetwork) -> None:
    club, trainers = await with_keys(network, "ab", quorum=2)
    await club.average(*trainers, rounds=EVERY - 2)
    network.crash(club.seed.peer)
    await club.average(*trainers, rounds=EVERY)
    for each in trainers:
        assert book_of(each).round == EVERY


@simulated(seed=10)
async def test_the_seed_signs_no_digest_that_one_member_names(network: SimulatedNetwork) -> None:
    """That member asks it for a vote on the round after the anchor's before anybody else does."""
    club, (*trainers, evil) = await established(network, "abcd", anchor_rounds=EVERY)
    await club.average(*trainers, evil, rounds=EVERY - evil.sync.head.round)
    evil.sync.participate(False)
    right = evil.sync.head
    assert right.round == EVERY
    evil.state.head = replace(right, digest=b"x" * 32)
    assert await ask_for_votes(evil, forge(evil).certificate, [club.seed.peer.peer_id]) == []
    evil.state.head = right
    await club.average(*trainers, rounds=4)
    newest = book_of(trainers[0]).newest
    assert newest is not None
    assert newest.digest == right.digest


@pytest.mark.parametrize("mode", ["open", "invite"])
@simulated(seed=9)
async def test_unless_the_manifest_names_keys_founders_sign_among_strangers(
    network: SimulatedNetwork, mode: str
) -> None:
    club = Club(network, mode)
    trainer = await club.start("a")
    assert book_of(trainer).keys == ({club.seed.peer.peer_id} if mode == "open" else set())


@pytest.mark.parametrize("kind", ["made up", "certified by its roster alone"])
@pytest.mark.parametrize("round_", [EVERY + 4, 2 * EVERY])
@simulated(seed=6)
async def test_an_anchor_of_a_head_that_the_voters_did_not_certify_moves_nobody(
    network: SimulatedNetwork, kind: str, round_: int
) -> None:
    """Neither while its round is ahead, nor when it is over."""
    club, trainers = await established(network, "abc", anchor_rounds=EVERY)
    evil = await club.start("evil")
    evil.sync.participate(False)
    await club.average(*trainers, rounds=round_ - trainers[0].sync.head.round)
    assert book_of(trainers[0]).round == EVERY
    while evil.sync.head.round < 2 * EVERY:
        go_on_from(evil, forge(evil))
    head: Head = evil.sync.head
    if kind == "made up":
        head = replace(head, lineage=bytes(32))
    show(evil, [signed(club, head, evil.swarm)])
    if kind != "made up":

        async def tell_nothing(peer: str, request: AskChain) -> Chain:
            return Chain(())

        evil.rpc.serve(CHAIN, AskChain, tell_nothing)
    await announce(evil, *trainers)
    for each in trainers:
        await each.sync.follow_swarm(each.work)
    await asyncio.sleep(2.0)
    for each in trainers:
        assert book_of(each).round == EVERY
        assert not book_of(each).conflict
        assert each.membership.is_mistrusted(evil.peer.peer_id)
    await club.average(*trainers, rounds=2)
    assert len({each.sync.head.lineage for each in trainers}) == 1
    assert evil.sync.head.lineage != trainers[0].sync.head.lineage


def show(trainer: SimulatedTrainer, anchors: Sequence[Anchor], seconds: float = 0.0) -> None:
    """Answer questions for anchors at a trainer with these, so many seconds later."""

    async def answer(peer: str, request: AskAnchors) -> HeldAnchors:
        await asyncio.sleep(seconds)
        return HeldAnchors(tuple(anchors))

    trainer.rpc.serve(ANCHORS, AskAnchors, answer)


@simulated(seed=7)
async def test_after_a_partition_the_anchored_side_wins_over_more_rounds(network: SimulatedNetwork) -> None:
    """Both sides went on with the votes of two thirds: those in between voted twice, in two views."""
    club, trainers = await established(network, "abcd", anchor_rounds=EVERY)
    left, right, *between = trainers
    await club.average(*trainers, rounds=EVERY)
    assert book_of(right).round == EVERY
    right.sync.participate(False)
    for each in between:
        each.sync.participate(False)
    for _ in range(2 * EVERY):
        go_on_from(right, forge(right, *between, view=1))
    await club.average(left, *between, rounds=EVERY)
    assert book_of(left).round == 2 * EVERY
    assert not left.sync.head.is_reduced
    assert right.sync.head.outranks(left.sync.head)
    await announce(left, right)
    for _ in range(2):
        await right.sync.follow_swarm(right.work)
        await asyncio.sleep(3.0)
    assert right.sync.head == left.sync.head
    assert not book_of(right).is_off
    await refuses_nobody(club, left, right, *between)


@pytest.mark.parametrize("old", [False, True], ids=["no anchor", "an old anchor"])
@simulated(seed=11)
async def test_a_newcomer_that_meets_liars_and_the_seed_alone_follows_no_liar(
    network: SimulatedNetwork, old: bool
) -> None:
    """The seed has no certificates that lead to its anchor, and a liar is slow to say that it has none."""
    swarm = await rewritten(network, EVERY)
    newcomer = await swarm.club.start("newcomer", joins=False)

    async def tell_late(peer: str, request: AskChain) -> Chain:
        await asyncio.sleep(10.0)
        return Chain(())

    if old:
        book_of(newcomer).adopt(anchor_of(swarm, swarm.members[0], EVERY), is_off=False)
    else:
        swarm.evil.rpc.serve(CHAIN, AskChain, tell_late)
    await announce(swarm.evil, newcomer)
    knows_only(newcomer, swarm.evil)
    await newcomer.sync.catch_up.anchors.look()
    assert book_of(newcomer).round == 2 * EVERY
    knows_only(newcomer, swarm.evil)
    await newcomer.sync.follow_swarm(newcomer.work)
    assert newcomer.sync.head.lineage != swarm.evil.sync.head.lineage


@simulated(seed=12)
async def test_a_member_that_was_away_asks_for_anchors_before_it_follows_anybody(network: SimulatedNetwork) -> None:
    """Old voters, whose signatures it believes, announce the longer lineage."""
    swarm = await rewritten(network, EVERY)
    away, honest = swarm.away, swarm.members[0]
    network.crash(swarm.club.seed.peer)
    for each in swarm.members:
        show(each, book_of(each).held(), 2.2)
    before = away.sync.catch_up.resyncs
    await announce(swarm.evil, away)
    await announce(honest, away)
    await away.sync.follow_swarm(away.work)
    assert away.sync.head == honest.sync.head
    assert away.sync.catch_up.resyncs == before + 1, "and never was at the old voters' head"


@simulated(seed=13)
async def test_no_founder_lets_a_swarm_begin_again_behind_an_anchor(network: SimulatedNetwork) -> None:
    club, trainers = await established(network, "abc", anchor_rounds=EVERY)
    evil = await club.start("evil", joins=False)
    await club.average(*trainers, rounds=EVERY + 4 - trainers[0].sync.head.round)
    for each in trainers:
        network.crash(each.peer)
    club.seed.membership._known.clear()
    await asyncio.sleep(10 * WAIT_SECONDS)
    assert await ask_for_votes(evil, forge(evil, view=1).certificate, [club.seed.peer.peer_id]) == []
    assert [each.head.round for each in await anchors_of_seed(club, evil)] == [EVERY]


async def anchors_of_seed(club: Club, asker: SimulatedTrainer) -> Sequence[Anchor]:
    return (await asker.rpc.call(club.seed.peer.peer_id, ANCHORS, AskAnchors(), HeldAnchors, 5.0)).anchors


@simulated(seed=14)
async def test_the_seed_signs_no_digest_that_a_reduced_round_names(network: SimulatedNetwork) -> None:
    """One invited member can certify a reduced round after the anchor's head alone."""
    club, (*trainers, evil) = await established(network, "abcd", anchor_rounds=EVERY)
    await club.average(*trainers, evil, rounds=EVERY - evil.sync.head.round)
    evil.sync.participate(False)
    evil.state.head = replace(evil.sync.head, digest=b"x" * 32)
    go_on_from(evil, forge(evil, is_reduced=True))
    await ask_for_votes(evil, forge(evil).certificate, [club.seed.peer.peer_id])
    assert b"x" * 32 not in [each.head.digest for each in await anchors_of_seed(club, evil)]


@simulated(seed=1)
async def test_an_old_anchor_after_a_newer_one_is_no_contradiction(network: SimulatedNetwork) -> None:
    """For a peer on another lineage, whose log differs from both."""
    swarm = await rewritten(network, EVERY)
    misled, honest = swarm.evil, swarm.members[0]
    show(honest, [anchor_of(swarm, honest, 2 * EVERY), anchor_of(swarm, honest, EVERY)])
    await announce(honest, misled)
    for _ in range(2):
        await misled.sync.follow_swarm(misled.work)
        await asyncio.sleep(6.0)
    assert not book_of(misled).conflict
    assert misled.sync.head == honest.sync.head


@pytest.mark.parametrize("holder", ["a newcomer", "a peer on the other lineage"])
@simulated(seed=16)
async def test_a_second_anchor_that_excludes_the_first_stops_also(network: SimulatedNetwork, holder: str) -> None:
    """The newcomer hears of two anchors of one round. The other peer hears of a later one, of its own lineage."""
    swarm = await rewritten(network, EVERY)
    evil, honest = swarm.evil, swarm.members[0]
    peer = evil if holder != "a newcomer" else await swarm.club.start("newcomer", joins=False)
    source = honest if peer is evil else evil
    book_of(peer).adopt(anchor_of(swarm, honest, 2 * EVERY), is_off=peer is evil)
    show(source, [anchor_of(swarm, evil, (3 if peer is evil else 2) * EVERY)])
    await announce(source, peer)
    knows_only(peer, source)
    await peer.sync.catch_up.anchors.look()
    await asyncio.sleep(6.0)
    assert book_of(peer).conflict


@simulated(seed=17)
async def test_an_old_anchor_moves_nobody_whose_source_withholds_what_followed(network: SimulatedNetwork) -> None:
    """The victim came after the anchor, and has no certificates from there on; others have."""
    club, trainers = await established(network, "abcd", anchor_rounds=EVERY)
    *members, evil = trainers
    await club.average(*trainers, rounds=2 * EVERY)
    network.crash(club.seed.peer)
    for each in trainers:
        show(each, [])
    victim = await club.start("victim")
    await club.average(*trainers, victim)
    assert book_of(victim).round == 0
    before = victim.sync.head
    show(evil, [signed(club, head_of(evil, EVERY), evil.swarm)])

    async def tell_nothing(peer: str, request: AskChain) -> Chain:
        return Chain(())

    evil.rpc.serve(CHAIN, AskChain, tell_nothing)
    await victim.sync.catch_up.anchors._ask_one(evil.peer.peer_id)
    assert book_of(victim).round == EVERY
    assert not book_of(victim).is_off
    assert victim.sync.head == before
    assert len(members) == 3


@simulated(seed=18)
async def test_an_anchor_of_a_round_far_ahead_moves_no_peer_that_goes_on(network: SimulatedNetwork) -> None:
    """The anchor key is stolen; no voter's key is. A peer that is stalled must take the keys' word."""
    club, trainers = await established(network, "abc", anchor_rounds=EVERY)
    evil = await club.start("evil")
    evil.sync.participate(False)
    await club.average(*trainers, rounds=EVERY - trainers[0].sync.head.round + 4)
    evil.state.head = replace(evil.sync.head, round=100 * EVERY - 1, lineage=b"x" * 32)
    go_on_from(evil, forge(evil))
    show(evil, [signed(club, evil.sync.head, evil.swarm)])
    await announce(evil, *trainers)
    for each in trainers:
        await each.sync.follow_swarm(each.work)
    await asyncio.sleep(2.0)
    for each in trainers:
        assert book_of(each).round == EVERY
        assert each.sync.head.round == EVERY + 4
    await club.average(*trainers, rounds=EVERY)
    assert book_of(trainers[0]).round == 2 * EVERY
    trainers[0].sync.position.standstill = WAIT_SECONDS
    await trainers[0].sync.catch_up.anchors._ask_one(evil.peer.peer_id)
    assert book_of(trainers[0]).round == 100 * EVERY


@simulated(seed=19)
async def test_strangers_do_not_keep_a_peer_from_asking_others(
    network: SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crowd on lineages of its own has the first ids in any order."""
    swarm = await rewritten(network, EVERY)
    misled = swarm.evil
    book_of(misled).adopt(anchor_of(swarm, swarm.members[0], 2 * EVERY), is_off=True)
    crowd = [f"0{number:02}" for number in range(20)]
    for each in (*crowd, "zz"):
        record = replace(misled.describe(), peer=each, lineage=each.encode() * 4, state="training")
        misled.membership.update(record, 1, expires_at=math.inf)
    search, asked = misled.sync.catch_up.anchors, set[str]()

    async def ask(peer: str) -> None:
        asked.add(peer)

    monkeypatch.setattr(search, "_ask_one", ask)
    for _ in range(500):  # Each look draws three of them.
        await search.look()
        await asyncio.sleep(1.0)
    assert {*crowd, "zz"} <= asked


@simulated(seed=20)
async def test_a_search_that_hangs_ends(network: SimulatedNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    club = Club(network, anchor_rounds=EVERY)
    trainer = await club.start("a")
    search, began = trainer.sync.catch_up.anchors, 0

    async def ask(peer: str) -> None:
        nonlocal began
        began += 1
        await asyncio.Event().wait()

    monkeypatch.setattr(search, "_ask_one", ask)
    trainer.state.head = replace(trainer.sync.head, round=EVERY + 1)
    await search.look()
    await asyncio.sleep(61.0)
    search._keys_asked_at = -1
    await search.look()
    await asyncio.sleep(1.0)
    assert began == 2


@simulated(seed=37)
async def test_a_key_that_did_not_answer_is_asked_again(
    network: SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a peer whose round does not end: it may need the key's word for that."""
    club = Club(network, anchor_rounds=EVERY)
    trainer = await club.start("a")
    search, asked = trainer.sync.catch_up.anchors, list[str]()
    trainer.state.head = replace(trainer.sync.head, round=EVERY + 1)
    network.crash(club.seed.peer)
    await search.look()
    await asyncio.sleep(10.0)

    async def ask(peer: str) -> None:
        asked.append(peer)

    monkeypatch.setattr(search, "_ask_one", ask)
    for _ in range(3):
        await search.look()
        await asyncio.sleep(1.0)
    assert asked == [club.seed.peer.peer_id], "but once if it answers"


@simulated(seed=21)
async def test_a_head_at_the_anchor_has_its_digest(network: SimulatedNetwork) -> None:
    """The certificate that leads there names no digest: only the next one does."""
    swarm = await rewritten(network, EVERY)
    newcomer, anchor = await swarm.club.start("newcomer", joins=False), anchor_of(swarm, swarm.members[0], 2 * EVERY)
    book_of(newcomer).adopt(anchor, is_off=False)
    check_head(newcomer.sync.replica.context, anchor.head)
    with pytest.raises(IntegrityError, match="another digest than its anchor"):
        check_head(newcomer.sync.replica.context, replace(anchor.head, digest=b"x" * 32))


@simulated(seed=22)
async def test_a_peer_that_leaves_its_lineage_for_the_anchor_goes_to_no_beginning(network: SimulatedNetwork) -> None:
    swarm = await rewritten(network, EVERY)
    misled, context = swarm.evil, swarm.evil.sync.replica.context
    book_of(misled).adopt(anchor_of(swarm, swarm.members[0], 2 * EVERY), is_off=True)
    with pytest.raises(IntegrityError, match="before the newest anchor"):
        await misled.sync.averager.round_log.believe("x", misled.sync.head, context.genesis(b"x" * 32))


@simulated(seed=31)
async def test_an_anchor_that_comes_during_a_download_counts_for_it(
    network: SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Liars proved their head before, as a newcomer believed them. It takes none of their state."""
    swarm = await rewritten(network, EVERY)
    evil, honest = swarm.evil, swarm.members[0]
    network.crash(swarm.club.seed.peer)
    newcomer = await swarm.club.start("newcomer", joins=False)
    await announce(evil, newcomer)
    knows_only(newcomer, evil)
    download = newcomer.sync.catch_up._downloaded
    fetched = download.fetched

    @contextlib.asynccontextmanager
    async def meanwhile(source: str, head: Head) -> AsyncIterator[None]:
        async with fetched(source, head):
            book_of(newcomer).adopt(anchor_of(swarm, honest, 2 * EVERY), is_off=False)
            yield

    monkeypatch.setattr(download, "fetched", meanwhile)
    assert not await newcomer.sync.catch_up.follow(evil.peer.peer_id, newcomer.work)
    assert newcomer.sync.head.round == 0
    await announce(honest, newcomer)
    assert await newcomer.sync.catch_up.follow(honest.peer.peer_id, newcomer.work)
    assert newcomer.sync.head == honest.sync.head


@simulated(seed=32)
async def test_a_liar_that_announces_many_rounds_and_does_not_answer_slows_no_round(network: SimulatedNetwork) -> None:
    """Nobody follows it, because its rounds are not full; so nobody finds out that it lies."""
    club, trainers = await established(network, "abc", anchor_rounds=EVERY)
    evil = await club.start("evil", joins=False)
    await club.average(*trainers, rounds=EVERY)
    evil.state.head = replace(evil.sync.head, round=1000, lineage=b"x" * 32, full=0)
    show(evil, [], 100.0)
    await announce(evil, *trainers)
    await club.average(*trainers, rounds=PATIENT_ROUNDS)  # They wait as long for any newcomer.
    began = network.loop.time()
    await club.average(*trainers, rounds=2 * EVERY)
    assert network.loop.time() - began < 2 * EVERY


@simulated(seed=33)
async def test_a_swarm_that_restarts_as_a_whole_knows_that_its_lineage_has_the_anchor(
    network: SimulatedNetwork, tmp_path: Path
) -> None:
    """The seed had signed before; no trainer had heard of it, and nobody has a certificate from there on any more."""
    club = Club(network, anchor_rounds=EVERY)
    trainers = list(await asyncio.gather(*(club.start(name, scratch=tmp_path / name) for name in "abc")))
    for each in trainers:
        context = each.sync.replica.context
        each.sync.catch_up.anchors._book = AnchorBook(each.swarm, each.peer.signer, context.any_certificate)
    await club.average(*trainers, rounds=EVERY + 3)
    assert [book_of(each).round for each in trainers] == [0, 0, 0]
    again = await club.restart_all(trainers, [save(each) for each in trainers])
    await club.average(*again)
    assert [(book_of(each).round, book_of(each).is_off) for each in again] == 3 * [(EVERY, False)]
    await club.average(*again, rounds=2 * EVERY)
    assert [(book_of(each).round, book_of(each).is_off) for each in again] == 3 * [(3 * EVERY, False)]


@simulated(seed=34)
async def test_a_swarm_whose_checkpoints_are_all_older_than_the_anchor_goes_on(
    network: SimulatedNetwork, tmp_path: Path
) -> None:
    """The power failed at all. They part from the anchor, which the seed still shows, and sign the next."""
    club = Club(network, anchor_rounds=EVERY)
    trainers = list(await asyncio.gather(*(club.start(name, scratch=tmp_path / name) for name in "abc")))
    await club.average(*trainers, rounds=EVERY - 2)
    saved = [save(each) for each in trainers]
    await club.average(*trainers, rounds=EVERY)
    assert [book_of(each).round for each in trainers] == 3 * [EVERY]
    again = await club.restart_all(trainers, saved)
    for each in again:
        each.peer.spawn(train(each))
    await asyncio.sleep(40.0)
    for each in again:
        each.stop = True
    await asyncio.sleep(60.0)
    assert max(each.sync.head.full for each in again) - min(each.sync.head.full for each in again) <= 1
    for each in again:
        assert not each.sync.head.is_reduced
        assert book_of(each).round > EVERY
        assert not book_of(each).conflict


@simulated(seed=35)
async def test_a_peer_that_came_while_nobody_told_of_the_anchor_hears_of_it_from_the_others(
    network: SimulatedNetwork,
) -> None:
    """The key is down, and the others are on its own lineage."""
    club, trainers = await established(network, "abc", anchor_rounds=EVERY)
    await club.average(*trainers, rounds=EVERY)
    network.crash(club.seed.peer)
    for each in trainers:
        show(each, [])
    newcomer = await club.start("newcomer")
    await club.average(*trainers, newcomer)
    assert book_of(newcomer).round == 0
    for each in trainers:
        show(each, book_of(each).held())
    await club.average(*trainers, newcomer, rounds=2)
    assert book_of(newcomer).round == EVERY
    assert not book_of(newcomer).is_off


@simulated(seed=36)
async def test_a_member_that_meets_only_peers_that_came_after_the_anchor_rejoins(network: SimulatedNetwork) -> None:
    """They cannot show what leads there. That is no lie, and the voters that both know have signed."""
    club, (away, *others) = await established(network, "abcd", anchor_rounds=EVERY)
    away.sync.participate(False)
    network.cut(away.peer)
    await club.average(*others, rounds=3 * EVERY + 2 - away.sync.head.round)
    for each in others:
        each.sync.averager.round_log.begin_at(each.sync.head)  # as after a download
    network.mend(away.peer)
    for each in others:
        await announce(each, away)
    await away.sync.follow_swarm(away.work)
    assert away.sync.head == others[0].sync.head
    away.sync.participate(True)
    await club.average(away, *others, rounds=EVERY + 4)
    assert book_of(away).round == 4 * EVERY
    assert not book_of(away).is_off
    assert away.sync.catch_up.resyncs == 1, "and it went back to no earlier head that a record still told of"


async def refuses_nobody(club: Club, *trainers: SimulatedTrainer) -> None:
    for each in trainers:
        each.sync.participate(True)
    await club.average(*trainers, rounds=2)
    assert len({each.sync.head.lineage for each in trainers}) == 1
