"""How training ends: at the last round for everybody, and with an error when nothing can mend what is wrong."""

import asyncio

import pytest

from p2ptrain.errors import IntegrityError
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.training.sync.catch_up import MAX_REPAIRS
from tests.support.coroutines import simulated
from tests.support.sim.trainers import SimulatedSwarm, make_manifest


@pytest.mark.parametrize("seed", range(5))
@simulated()
async def test_nobody_goes_beyond_the_last_round(network: SimulatedNetwork, seed: int) -> None:
    swarm = SimulatedSwarm(network, make_manifest(), seed)
    for index in range(4):
        swarm.start(f"t{index}", step_seconds=0.1 + 0.3 * index).sync.last_round = 5
    await swarm.until(lambda: swarm.in_agreement(5), 180, "all come to the last round")
    await asyncio.sleep(30)
    assert {trainer.sync.head.round for trainer in swarm.alive} == {5}
    assert len({trainer.sync.head.digest for trainer in swarm.alive}) == 1
    assert swarm.ledger.forked_rounds == []


@pytest.mark.fault(5, 21)
@simulated(seed=1)
async def test_damaged_memory_that_nobody_can_mend_ends_training_with_what_to_do(network: SimulatedNetwork) -> None:
    swarm = SimulatedSwarm(network, make_manifest(), 0)
    lone = swarm.start("lone")
    await swarm.until(lambda: lone.sync.head.round >= 2, 60, "it trains alone")
    stands_at, tried = lone.sync.head, len(lone.results)
    lone.state.vector[3] += 1.0
    with pytest.raises(IntegrityError, match="start again from the last checkpoint"):
        await asyncio.wait_for(asyncio.shield(swarm.tasks.pop("lone")), 600)
    assert lone.sync.head == stands_at
    assert len(lone.results) - tried == MAX_REPAIRS - 1
