"""Stage hosts of different speeds: a round waits for no queue of a slow one."""

from __future__ import annotations

import asyncio

import pytest

from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.sim.peers import until
from tests.support.sim.pipelines import SAMPLES, Pipeline, PipelinePeer, make_manifest

SPEEDS = (1.0, 1.0, 8.0)
"""Of the hosts of each of two stages: microbatches' passes per second, on any but the last stage, which does both."""
MICROBATCHES = 96
"""In a round."""
AT_ONCE = 24
ROUNDS = 2
"""That are measured, after the first two."""


async def feed(trainer: PipelinePeer, number: int) -> None:
    while True:
        await trainer.peer.spawn(trainer.send(number))
        number += AT_ONCE


@pytest.mark.fault(51)
@simulated(seed=1)
async def test_a_round_of_stages_does_not_wait_for_what_gathered_at_slow_hosts(network: SimulatedNetwork) -> None:
    pipeline = Pipeline(network, make_manifest(2, global_batch=MICROBATCHES * SAMPLES))
    for stage in range(2):
        for index, speed in enumerate(SPEEDS):
            await pipeline.add(f"h{stage}-{index}", stage, 1.0 / speed / 2)
    await until(lambda: all(host.status == "training" for host in pipeline.hosts))
    trainer = await pipeline.add("trainer", None)
    feeding = [asyncio.ensure_future(feed(trainer, first)) for first in range(AT_ONCE)]
    least_seconds = MICROBATCHES / sum(SPEEDS)
    patience_seconds = 4 * (ROUNDS + 2) * (least_seconds + 10.0)
    await until(lambda: min(pipeline.rounds()) >= 2, patience_seconds, 0.1)
    began = network.loop.time()
    await until(lambda: min(pipeline.rounds()) >= 2 + ROUNDS, patience_seconds, 0.1)
    # Of a round of 10 s, averaging takes one, and the last microbatches need 2 or 3 for their way.
    assert ROUNDS * least_seconds / (network.loop.time() - began) >= 0.65
    for task in feeding:
        task.cancel()
    await asyncio.gather(*feeding, return_exceptions=True)
    await pipeline.close()
