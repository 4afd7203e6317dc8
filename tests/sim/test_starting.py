"""Peers that start together: one lineage from the first round on."""

from __future__ import annotations

import asyncio
import random

import pytest

from p2ptrain.network.simulated import SimulatedNetwork, simulate
from tests.support.trainers import SimulatedSwarm, make_manifest


@pytest.mark.parametrize("seed", range(40))
def test_peers_that_start_within_seconds_do_not_fork(seed: int) -> None:
    generator = random.Random(f"starting {seed}")

    async def main(network: SimulatedNetwork) -> None:
        swarm = SimulatedSwarm(network, make_manifest(), seed)
        for index in range(generator.randint(2, 6)):
            # Four steps a round: from rounds that are over before anybody looks twice to slow ones.
            swarm.start(f"t{index}", step_seconds=generator.choice((0.02, 0.1, 0.5)))
            await asyncio.sleep(generator.choice((0.0, 0.05, 0.5, 2.0)) * generator.random())
        await swarm.until(lambda: swarm.in_agreement(4), 120, "all train together")
        await swarm.end()
        assert swarm.ledger.forked_rounds == []

    simulate(main, seed)
