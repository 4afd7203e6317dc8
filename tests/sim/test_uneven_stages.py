"""Stage hosts of different speeds: a round waits for no queue of a slow one."""

import asyncio
from collections.abc import Sequence

import pytest

from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.sim.peers import until
from tests.support.sim.pipelines import SAMPLES, Pipeline, make_manifest

ROUNDS = 2
"""That are measured, after the first two."""


async def done_ratio(network: SimulatedNetwork, speeds: Sequence[float], microbatches: int, at_once: int) -> float:
    """Microbatches of committed rounds, as a share of what the hosts of a stage could do in the same time.

    ``speeds`` are of the hosts of each of two stages, in microbatches a second.
    """
    pipeline = Pipeline(network, make_manifest(2, global_batch=microbatches * SAMPLES))
    for stage in range(2):
        for index, speed in enumerate(speeds):
            await pipeline.add(f"h{stage}-{index}", stage, 1.0 / speed / 2)  # The last stage does both passes at once.
    await until(lambda: all(host.status == "training" for host in pipeline.hosts))
    trainer = await pipeline.add("trainer", None)

    async def feed(number: int) -> None:
        while True:
            await trainer.peer.spawn(trainer.send(number))
            number += at_once

    feeding = [asyncio.ensure_future(feed(first)) for first in range(at_once)]
    least_seconds = microbatches / sum(speeds)
    patience_seconds = 4 * (ROUNDS + 2) * (least_seconds + 10.0)
    await until(lambda: min(pipeline.rounds()) >= 2, patience_seconds, 0.1)
    began = network.loop.time()
    await until(lambda: min(pipeline.rounds()) >= 2 + ROUNDS, patience_seconds, 0.1)
    ratio = ROUNDS * least_seconds / (network.loop.time() - began)
    for task in feeding:
        task.cancel()
    await asyncio.gather(*feeding, return_exceptions=True)
    await pipeline.close()
    return ratio


@pytest.mark.fault(51)
@simulated(seed=1)
async def test_a_round_of_stages_does_not_wait_for_what_gathered_at_slow_hosts(network: SimulatedNetwork) -> None:
    """Of a round of 10 s, averaging takes one, and the last microbatches need 2 or 3 for their way."""
    assert await done_ratio(network, (1.0, 1.0, 8.0), 96, 24) >= 0.6
