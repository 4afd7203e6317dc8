"""A trainer reports its local steps, and ends a round in time, whatever it hears of the others."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from p2ptrain.averaging.grouping.membership import rank
from p2ptrain.averaging.grouping.reporting import LEAST_WAIT_SECONDS, REPORT_SECONDS, Pacing
from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.averaging.timing.goal import SILENT_SECONDS, Goal, StepProgress
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.sim.averagers import GroupingPeer, make_matchmaker
from tests.support.sim.averaging import HEAD
from tests.support.sim.peers import members

SPEC = AveragingSpec(grace_seconds=2.0, matchmaking_seconds=8.0)
NEXT = [replace(HEAD, round=1, lineage=bytes([number]) * 32, tokens=10) for number in range(16)]
"""Heads of the next round, which differ in who leads."""
EVERY = 8


class Peer(GroupingPeer):
    """A trainer's side of pacing."""

    @property
    def pacing(self) -> Pacing:
        return self.matchmaker.pacing

    def reports(self) -> dict[str, StepProgress]:
        """Return the reports of steps that this peer has as the leader of its round."""
        group = self.matchmaker._coordinator._groups.get(self.matchmaker.position.key)
        return {} if group is None else group.steps.reports

    def leads(self, head: Head, other: "Peer") -> bool:
        """True if this one of two peers leads the round after a head."""
        key = self.matchmaker.cells.key_of(head, self.id)
        return rank(self.id, key) < rank(other.id, key)


Two = tuple[Peer, Peer]


@asynccontextmanager
async def two(network: SimulatedNetwork, spec: AveragingSpec = SPEC, latency: float = 0.03) -> AsyncIterator[Two]:
    """Two trainers: the leader of the round in progress, and its follower."""
    async with members(network, 2) as started:
        goal = Goal(steps=EVERY)
        one, other = (Peer(member, *make_matchmaker(member, started, spec, HEAD, goal)) for member in started)
        leader, follower = (one, other) if one.leads(HEAD, other) else (other, one)
        network.set_latency(one.peer, other.peer, latency)
        for peer in (leader, follower):
            peer.peer.spawn(peer.participate())
        await asyncio.sleep(0.1)
        try:
            yield leader, follower
        finally:
            for peer in (leader, follower):
                network.resume(peer.peer)
                await peer.matchmaker.close()


@simulated(two, seed=1)
async def test_peers_step_until_the_instant_that_the_leader_foresees(pair: Two) -> None:
    leader, follower = pair
    for steps in (1, 2, 3):
        for peer in (leader, follower):
            peer.pacing.note(steps, 1.0)
        await asyncio.sleep(1.0)
        assert not follower.pacing.is_due(steps)
    left = follower.pacing.seconds_left
    assert left is not None
    assert left == pytest.approx(EVERY - 4, abs=0.5), "the fourth step is done just now"


@simulated(two, seed=1)
async def test_steps_of_another_thread_wake_the_loop_only_for_a_report(pair: Two) -> None:
    leader, follower = pair
    woken = list[Callable[[], None]]()
    for steps in range(1, 7):
        follower.pacing.note(steps, 0.25, woken.append)
        await asyncio.sleep(0.25)
    assert len(woken) == 1
    await asyncio.sleep(REPORT_SECONDS)
    assert leader.reports()[follower.id].steps == 6, "the others are in the next report"


@simulated(two, seed=1)
async def test_a_peer_that_hears_of_no_leader_does_its_own_steps(pair: Two, network: SimulatedNetwork) -> None:
    leader, follower = pair
    network.crash(leader.peer)
    follower.pacing.note(EVERY - 1, 1.0)
    await asyncio.sleep(SILENT_SECONDS)
    assert not follower.pacing.is_due(EVERY - 1)
    assert follower.pacing.is_due(EVERY)


@pytest.mark.parametrize("is_behind", [False, True])
@simulated(two, seed=1)
async def test_a_peer_that_is_behind_ends_its_old_round_after_the_step_in_progress(pair: Two, is_behind: bool) -> None:
    """Nobody comes to close that round: with a goal of its own it would go on alone."""
    leader, follower = pair
    follower.pacing.note(1, 1.0)
    leader.pacing.note(1, 1.0)
    await asyncio.sleep(1.0)
    assert not follower.pacing.is_due(2)
    follower.pacing.start(lambda: is_behind)
    await asyncio.sleep(REPORT_SECONDS + 0.5)
    assert follower.pacing.is_due(2) is is_behind


@simulated(two, seed=1)
async def test_a_peer_that_caught_up_knows_at_once_when_the_round_closes(pair: Two) -> None:
    """It has handed in what it has, and reports nothing until it knows whether another step fits."""
    leader, follower = pair
    for peer in (leader, follower):
        peer.pacing.note(3, 1.0)
    await asyncio.sleep(1.0)
    with follower.pacing.handing_in():
        head = next(head for head in NEXT if leader.leads(head, follower))
        for peer in (leader, follower):
            peer.matchmaker.set_head(head)
        leader.pacing.note(0)
        await asyncio.sleep(REPORT_SECONDS)
        before = follower.pacing.has_time
        await follower.pacing.refresh()
        assert (before, follower.pacing.has_time) == (False, True)
        report = leader.reports()[follower.id]
        assert (report.steps, report.is_stepping) == (0, False), "it has done nothing for this round"


@simulated(two, seed=1)
async def test_asking_when_the_round_closes_does_not_wait_for_a_silent_leader(
    pair: Two, network: SimulatedNetwork
) -> None:
    """The others may be about to close the round without this peer."""
    leader, follower = pair
    follower.pacing.note(3, 1.0)
    await asyncio.sleep(1.0)
    network.stall(leader.peer)
    began = network.loop.time()
    await follower.pacing.refresh()
    assert network.loop.time() - began == pytest.approx(LEAST_WAIT_SECONDS)


@pytest.mark.parametrize(("latency", "grace"), [(1.0, 3.0), (2.0, 10.0)], ids=lambda value: f"{value:g}")
@simulated(seed=1)
async def test_a_peer_over_a_slow_link_is_not_taken_for_silent(
    network: SimulatedNetwork, latency: float, grace: float
) -> None:
    """A report takes 4 times the latency there: longer than the grace period, or than two of another peer's reports."""
    async with two(network, SPEC.model_copy(update={"grace_seconds": grace}), latency) as (leader, follower):
        for peer in (leader, follower):
            peer.pacing.note(1, 100.0)
        await asyncio.sleep(15.0)
        for _ in range(60):
            await asyncio.sleep(0.5)
            report = leader.reports()[follower.id]
            assert network.loop.time() - report.heard_at < SILENT_SECONDS
            assert follower.pacing.seconds_left is not None
            assert not follower.membership.suspects()
