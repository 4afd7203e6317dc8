"""Anchors: no stolen keys rewrite the past, contradictions stop peers, and a swarm does without."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from p2ptrain.averaging.commit.anchoring import ANCHORS, AskAnchors, HeldAnchors
from p2ptrain.averaging.protocol.anchors import Anchor, AnchorBook
from p2ptrain.averaging.protocol.certificate import CHAIN, AskChain, Chain, Head
from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.sim.clubs import WAIT_SECONDS, Club, announce, ask_for_votes, established, refuses
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
    """Let a trainer forget the records of all but one peer."""
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
    head = next(head for head in trainer.sync.averager.round_log.heads() if head.round == round_)
    return signed(swarm.club, head, trainer.swarm)


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


def show(trainer: SimulatedTrainer, anchors: Sequence[Anchor]) -> None:
    """Let a trainer tell others of these anchors."""

    async def answer(peer: str, request: AskAnchors) -> HeldAnchors:
        return HeldAnchors(tuple(anchors))

    trainer.rpc.serve(ANCHORS, AskAnchors, answer)


@simulated(seed=7)
async def test_after_a_partition_the_anchored_side_wins_over_more_rounds(network: SimulatedNetwork) -> None:
    """Both sides went on with the votes of two thirds: those in between voted twice."""
    club, trainers = await established(network, "abcd", anchor_rounds=EVERY)
    left, right, *between = trainers
    await club.average(*trainers, rounds=EVERY)
    assert book_of(right).round == EVERY
    right.sync.participate(False)
    for each in between:
        each.sync.participate(False)
    for _ in range(2 * EVERY):
        go_on_from(right, forge(right, *between))
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


@simulated(seed=13)
async def test_no_founder_lets_a_swarm_begin_again_behind_an_anchor(network: SimulatedNetwork) -> None:
    club, trainers = await established(network, "abc", anchor_rounds=EVERY)
    evil = await club.start("evil", joins=False)
    await club.average(*trainers, rounds=EVERY + 4 - trainers[0].sync.head.round)
    for each in trainers:
        network.crash(each.peer)
    club.seed.membership._known.clear()
    await asyncio.sleep(10 * WAIT_SECONDS)
    assert await ask_for_votes(evil, forge(evil).certificate, [club.seed.peer.peer_id]) == []
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


async def refuses_nobody(club: Club, *trainers: SimulatedTrainer) -> None:
    for each in trainers:
        each.sync.participate(True)
    await club.average(*trainers, rounds=2)
    assert len({each.sync.head.lineage for each in trainers}) == 1
