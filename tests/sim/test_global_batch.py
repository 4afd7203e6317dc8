"""Whole models that average gradients (`every = 1`), at a learning rate that changes with every round."""

import asyncio

import pytest

from p2ptrain.averaging.grouping.messages import REPORT, BatchAdvice, BatchReport
from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.sim.trainers import SimulatedSwarm, SimulatedTrainer, make_manifest

SECONDS = 300.0
TRAINING = {"every": 1, "global_batch": 12, "local_batch": 1}


def start(network: SimulatedNetwork, num_peers: int = 3, **averaging: object) -> SimulatedSwarm:
    swarm = SimulatedSwarm(network, make_manifest(TRAINING, **averaging), 0)
    for index in range(num_peers):
        swarm.start(f"t{index}")
    return swarm


@pytest.mark.parametrize("seed", range(4))
@simulated()
async def test_a_survivor_does_not_wait_for_a_dead_leader_to_tell_it_that_the_batch_is_full(
    network: SimulatedNetwork, seed: int
) -> None:
    swarm = start(network, num_peers=2)
    one, two = swarm.trainers.values()

    def has_called(a: SimulatedTrainer, b: SimulatedTrainer) -> bool:
        leaders, key = b.sync.averager.matchmaker.leaders, b.sync.averager.matchmaker.position.key
        return a.peer.peer_id in leaders.probers(key) and leaders.candidates(key, [])[0] == a.peer.peer_id

    await swarm.until(lambda: has_called(one, two) or has_called(two, one), 90, "a leader has shown itself")
    dead, survivor = (one, two) if has_called(one, two) else (two, one)
    round_ = survivor.sync.head.round
    swarm.crash(dead.peer.name)
    await swarm.until(lambda: survivor.sync.head.round >= round_ + 3, 90, "the survivor goes on")


@simulated(seed=8)
async def test_a_trainer_that_waits_for_a_full_batch_sees_that_the_others_are_ahead(network: SimulatedNetwork) -> None:
    swarm = start(network, num_peers=4)
    await swarm.until(lambda: swarm.in_agreement(2), 90, "the swarm trains")
    late = swarm.trainers["t3"]
    network.cut(late.peer)
    others = [trainer for trainer in swarm.alive if trainer is not late]
    # By itself it leads, and would wait for what the others were about to bring, which they do not any more.
    serve_report, asked = late.sync.averager.matchmaker._coordinator._serve_report, []

    async def never_full(peer: str, report: BatchReport) -> BatchAdvice:
        asked.append(peer)
        await serve_report(peer, report)
        await asyncio.sleep(1.0)
        return BatchAdvice(closing=False, wait=True)

    late.rpc.serve(REPORT, BatchReport, never_full)
    await swarm.until(lambda: len(asked) > 3, 120, "the late trainer waits")
    front = max(trainer.sync.head.round for trainer in others)
    network.mend(late.peer)
    await swarm.until(lambda: late.sync.head.round > front, 60, "the late trainer catches up")


@pytest.mark.fault(44)
@pytest.mark.parametrize("waits", [True, False], ids=["wait", "compute"])
@simulated(seed=6)
async def test_a_leader_that_never_calls_the_batch_full_loses_its_turn(network: SimulatedNetwork, waits: bool) -> None:
    """It lets the others wait for ever, or compute for ever."""
    swarm = start(network, num_peers=4)
    await swarm.until(lambda: swarm.in_agreement(6), 90, "the swarm trains")
    *others, hostile = swarm.alive
    hostile.is_hostile = True

    async def never_full(peer: str, report: BatchReport) -> BatchAdvice:
        await asyncio.sleep(1.0 if waits else 0.0)
        return BatchAdvice(closing=False, wait=waits)

    hostile.rpc.serve(REPORT, BatchReport, never_full)
    front = max(trainer.sync.head.round for trainer in others)
    await swarm.until(lambda: min(t.sync.head.round for t in others) >= front + 12, 120, "the others go on")
