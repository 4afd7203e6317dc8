"""Peers that are killed and started again without end: rounds go on, and nothing piles up in the survivors."""

import asyncio
import random

import pytest

from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.seeds import changing_seeds
from tests.support.sim.trainers import SimulatedSwarm, make_manifest

UNHARMED = ("a", "b")
HARMED = ("c", "d", "e")
CHAOS_SECONDS = 400.0
LONGEST_GAP_SECONDS = 300.0
FEW_TASKS = 12
"""What comes and goes: a probe, a look-up, an announcement of each peer."""


@pytest.mark.fault(6)
@pytest.mark.parametrize("seed", [1, changing_seeds("soak", 1)[0]])
@simulated()
async def test_rounds_go_on_and_no_task_piles_up_while_peers_are_killed_and_started_every_second(
    network: SimulatedNetwork, seed: int
) -> None:
    chance = random.Random(seed)
    swarm = SimulatedSwarm(network, make_manifest(), seed)
    for name in (*UNHARMED, *HARMED):
        swarm.start(name)
    loop = asyncio.get_running_loop()

    async def tasks_at_rest() -> int:
        """Start what is dead; the fewest that there are once all have been in agreement for a while."""
        for name in HARMED:
            if not swarm.trainers[name].peer.alive:
                swarm.restart(name)
        front = max(trainer.sync.head.round for trainer in swarm.alive)
        await swarm.until(lambda: swarm.in_agreement(front + 2), 200, "all are in agreement")
        await asyncio.sleep(60)
        counts = []
        for _ in range(50):
            await asyncio.sleep(0.2)
            counts.append(len(asyncio.all_tasks()))
        return min(counts)

    before = await tasks_at_rest()
    gaps = [0.0]
    committed, at = -1, loop.time()
    until = loop.time() + CHAOS_SECONDS
    while loop.time() < until:
        await asyncio.sleep(chance.uniform(0.5, 2.0))
        name = chance.choice(HARMED)
        swarm.crash(name) if swarm.trainers[name].peer.alive else swarm.restart(name)
        newest = min(swarm.trainers[name].sync.head.round for name in UNHARMED)
        if newest > committed:
            gaps.append(loop.time() - at)
            committed, at = newest, loop.time()
    assert max(gaps) < LONGEST_GAP_SECONDS
    assert len(gaps) > 10
    assert await tasks_at_rest() <= before + FEW_TASKS
