"""Peers that start together: one lineage from the first round on. Peers that start again: no wait for what is over."""

import asyncio
import random

import pytest

from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.sim.trainers import SimulatedSwarm, make_manifest


@pytest.mark.fault(7, 26)
@pytest.mark.parametrize("seed", [*range(16), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(16, 40))])
@simulated()
async def test_peers_that_start_within_seconds_do_not_fork(network: SimulatedNetwork, seed: int) -> None:
    generator = random.Random(f"starting {seed}")
    swarm = SimulatedSwarm(network, make_manifest(), seed)
    for index in range(generator.randint(2, 6)):
        # Four steps a round: from rounds that are over before anybody looks twice to slow ones.
        swarm.start(f"t{index}", step_seconds=generator.choice((0.02, 0.1, 0.5)))
        await asyncio.sleep(generator.choice((0.0, 0.05, 0.5, 2.0)) * generator.random())
    await swarm.until(lambda: swarm.in_agreement(4), 120, "all train together")
    assert swarm.ledger.forked_rounds == []


@pytest.mark.fault(12)
@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 15))])
@simulated()
async def test_a_swarm_below_its_minimum_goes_on_soon_after_the_missing_peer_is_back(
    network: SimulatedNetwork, seed: int
) -> None:
    generator = random.Random(f"restart {seed}")
    size = generator.randint(2, 5)
    manifest = make_manifest(min_peers=size)
    swarm = SimulatedSwarm(network, manifest, seed)
    for index in range(size):
        swarm.start(f"t{index}", step_seconds=generator.choice((0.1, 0.5)))
    await swarm.until(lambda: swarm.in_agreement(2), 120, "all train together")
    for _ in range(3):
        name = f"t{generator.randrange(size)}"
        swarm.crash(name)
        await asyncio.sleep(generator.choice((0.5, 12, 40)) * generator.random())
        stands_at = max(trainer.sync.head.round for trainer in swarm.alive)
        swarm.restart(name, generator.choice((0.1, 0.5)))
        # Two rounds without waiting for one matchmaking deadline: those that waited meet the one that came.
        enough = manifest.averaging.matchmaking_seconds
        await swarm.until(lambda reached=stands_at + 2: swarm.in_agreement(reached), enough, "all go on")  # type: ignore[misc]
    assert swarm.ledger.forked_rounds == []
