"""Anchors: no stolen keys rewrite the past, contradictions stop peers, and a swarm does without."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from p2ptrain.averaging.commit.anchoring import ANCHORS, HeldAnchors
from p2ptrain.averaging.protocol.anchors import Anchor
from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.network.schema import Nothing
from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.sim.clubs import Club, announce, established, refuses
from tests.support.sim.strangers import forge, go_on_from
from tests.support.sim.trainers import SimulatedTrainer

EVERY = 8
NEVER = 4096


class Rewrite:
    """A swarm whose old voters have left, and sign another past later.

    Attributes:
        members: The present members: none of them voted at the fork.
        evil: An old voter that holds the other lineage, which is longer, and parts at round 5.
    """

    def __init__(self, club: Club, members: list[SimulatedTrainer], evil: SimulatedTrainer) -> None:
        self.club, self.members, self.evil = club, members, evil


async def rewritten(network: SimulatedNetwork, every: int, scratch: Path | None = None) -> Rewrite:
    club, old = await established(network, "abc", anchor_rounds=every)
    evil, *staying = old
    evil.sync.participate(False)
    fork = evil.sync.head
    assert fork.round < EVERY
    young = [await club.start(name, scratch=scratch if name == "d" else None) for name in "def"]
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
    return Rewrite(club, young, evil)


@pytest.mark.fault(50)
@simulated(seed=1)
async def test_old_voters_keys_rewrite_nothing_before_an_anchor(network: SimulatedNetwork) -> None:
    """Neither for a member that was there at the fork, nor for a newcomer."""
    swarm = await rewritten(network, EVERY)
    evil, members = swarm.evil, swarm.members
    for each in members:
        anchors = each.sync.replica.context.anchors
        assert anchors.newest is not None
        assert anchors.newest.head.round == 2 * EVERY
    await announce(evil, *members)
    for each in members:
        await refuses(each, evil)
    newcomer = await swarm.club.start("newcomer", joins=False)
    await announce(evil, newcomer)
    await newcomer.sync.follow_swarm(newcomer.work)
    assert newcomer.sync.head == members[0].sync.head
    await swarm.club.average(*members, newcomer, rounds=2)
    assert newcomer.sync.head.lineage == members[0].sync.head.lineage


@simulated(seed=1)
async def test_without_anchors_old_voters_keys_rewrite_all(network: SimulatedNetwork) -> None:
    swarm = await rewritten(network, NEVER)
    evil, member = swarm.evil, swarm.members[0]
    newcomer = await swarm.club.start("newcomer", joins=False)
    await announce(evil, member, newcomer)
    for each in (member, newcomer):
        assert await each.sync.catch_up.follow(evil.peer.peer_id, each.work)
        assert each.sync.head == evil.sync.head


@pytest.mark.fault(50)
@simulated(seed=2)
async def test_a_restarted_peer_remembers_the_anchor(network: SimulatedNetwork, tmp_path: Path) -> None:
    """It has lost its state, and meets nobody but the old voters."""
    swarm = await rewritten(network, EVERY, tmp_path)
    evil, member = swarm.evil, swarm.members[0]
    for each in swarm.members:
        network.crash(each.peer)
    back = await swarm.club.restart(member)
    anchors = back.sync.replica.context.anchors
    assert anchors.newest is not None
    assert anchors.newest.head.round == 2 * EVERY
    await announce(evil, back)
    await refuses(back, evil)


@pytest.mark.fault(50)
@simulated(seed=3)
async def test_a_peer_on_a_lineage_without_the_anchor_leaves_it(network: SimulatedNetwork) -> None:
    """It followed the longer lineage while it saw nobody else."""
    swarm = await rewritten(network, EVERY)
    evil, members = swarm.evil, swarm.members
    misled = await swarm.club.start("misled", joins=False)
    await announce(evil, misled)
    misled.membership._known = {evil.peer.peer_id: misled.membership._known[evil.peer.peer_id]}
    assert await misled.sync.follow_swarm(misled.work)
    assert misled.sync.head == evil.sync.head
    await announce(members[0], misled)
    await misled.sync.follow_swarm(misled.work)
    await asyncio.sleep(2.0)
    assert await misled.sync.follow_swarm(misled.work)
    assert misled.sync.head == members[0].sync.head
    assert evil.sync.head.outranks(misled.sync.head)


@pytest.mark.fault(50)
@simulated(seed=4)
async def test_anchors_that_contradict_each_other_stop_both_sides(network: SimulatedNetwork) -> None:
    swarm = await rewritten(network, EVERY)
    evil, members = swarm.evil, swarm.members
    right = members[0].sync.replica.context.anchors.newest
    assert right is not None
    signer, head = swarm.club.seed.peer.signer, evil.sync.head
    # The same key, in other hands, signs the other lineage.
    wrong = Anchor(right.sequence + EVERY, replace(head, round=right.sequence + EVERY))
    wrong = anchor_of(swarm, evil, right.sequence + EVERY)
    evil.sync.replica.context.anchors.newest = wrong
    assert signer.verify(signer.peer_id, wrong.statement(evil.swarm), wrong.proofs[0][1])
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
    """The founder's signature of a head on a trainer's lineage."""
    heads = trainer.sync.averager.round_log._heads.values()
    head = next(head for head in heads if head.round == round_)
    return signed(swarm.club, Anchor(round_, head), trainer.swarm)


def signed(club: Club, anchor: Anchor, unit: bytes) -> Anchor:
    signer = club.seed.peer.signer
    return Anchor(anchor.sequence, anchor.head, ((signer.peer_id, signer.sign(anchor.statement(unit))),))


@simulated(seed=5)
async def test_training_goes_on_and_newcomers_come_while_no_anchor_key_is_up(network: SimulatedNetwork) -> None:
    club, trainers = await established(network, "abc", anchor_rounds=EVERY)
    await club.average(*trainers, rounds=EVERY)
    anchored = trainers[0].sync.replica.context.anchors.newest
    assert anchored is not None
    network.crash(club.seed.peer)
    await club.average(*trainers, rounds=2 * EVERY)
    assert trainers[0].sync.replica.context.anchors.newest == anchored
    assert not trainers[0].sync.head.is_reduced
    newcomer = await club.start("newcomer")
    assert newcomer.sync.head.lineage == trainers[0].sync.head.lineage
    await club.average(*trainers, newcomer)


@pytest.mark.fault(50)
@pytest.mark.parametrize("kind", ["made up", "certified by its roster alone"])
@simulated(seed=6)
async def test_an_anchor_of_a_head_that_the_voters_did_not_certify_moves_nobody(
    network: SimulatedNetwork, kind: str
) -> None:
    club, trainers = await established(network, "abc", anchor_rounds=EVERY)
    evil = await club.start("evil")
    evil.sync.participate(False)
    await club.average(*trainers, rounds=EVERY)
    first = trainers[0].sync.replica.context.anchors.newest
    assert first is not None
    while evil.sync.head.round < 2 * EVERY:
        go_on_from(evil, forge(evil))
    head: Head = evil.sync.head
    if kind == "made up":
        head = replace(head, lineage=bytes(32))
    false = signed(club, Anchor(2 * EVERY, head), evil.swarm)

    async def show(peer: str, request: Nothing) -> HeldAnchors:
        return HeldAnchors((false,))

    evil.rpc.serve(ANCHORS, Nothing, show)
    evil.sync.replica.context.anchors.newest = false
    await announce(evil, *trainers)
    assert any(record.anchor == false.claim for record in trainers[0].membership.records())
    await club.average(*trainers, rounds=3)
    lineages = {each.sync.head.lineage for each in trainers}
    assert len(lineages) == 1
    assert evil.sync.head.lineage not in lineages
