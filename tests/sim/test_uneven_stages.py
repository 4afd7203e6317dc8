"""Stage hosts of different speeds: a round waits for no queue of a slow one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from p2ptrain.network.simulated import SimulatedNetwork, simulate
from tests.support.sim.peers import until
from tests.support.sim.pipelines import SAMPLES, Pipeline, PipelinePeer, make_manifest

NUM_STAGES = 2
UNIT_SECONDS = 1.0
"""Of a microbatch's passes at speed 1, on any but the last stage, which does both at once."""


def done_ratio(speeds: Sequence[float], microbatches: int, at_once: int, rounds: int = 2, seed: int = 1) -> float:
    """Microbatches of committed rounds, as a share of what the hosts of a stage could do in the same time.

    Args:
        speeds: Of the hosts of each stage.
        microbatches: In a round.
        at_once: Under way at any time.
        rounds: That are measured, after the first two.
        seed: Of the simulation.
    """
    ratio = []

    async def main(network: SimulatedNetwork) -> None:
        pipeline = Pipeline(network, make_manifest(NUM_STAGES, global_batch=microbatches * SAMPLES))
        for stage in range(NUM_STAGES):
            for index, speed in enumerate(speeds):
                await pipeline.add(f"h{stage}-{index}", stage, UNIT_SECONDS / speed / 2)
        await until(lambda: all(host.status == "training" for host in pipeline.hosts))
        trainer = await pipeline.add("trainer", None)
        feeding = [asyncio.ensure_future(feed(trainer, first, at_once)) for first in range(at_once)]
        seconds = 4 * (rounds + 2) * (microbatches * UNIT_SECONDS / sum(speeds) + 10.0)
        await until(lambda: min(pipeline.rounds()) >= 2, seconds, 0.1)
        began = network.loop.time()
        await until(lambda: min(pipeline.rounds()) >= 2 + rounds, seconds, 0.1)
        able = sum(speeds) / UNIT_SECONDS * (network.loop.time() - began)
        ratio.append(rounds * microbatches / able)
        for task in feeding:
            task.cancel()
        await asyncio.gather(*feeding, return_exceptions=True)
        await pipeline.close()

    async def feed(trainer: PipelinePeer, number: int, at_once: int) -> None:
        while True:
            await trainer.peer.spawn(trainer.send(number))
            number += at_once

    simulate(main, seed)
    return ratio[0]


@pytest.mark.fault(51)
def test_a_round_of_stages_does_not_wait_for_what_gathered_at_slow_hosts() -> None:
    """Of a round of 10 s, averaging takes one, and the last microbatches need 2 or 3 for their way."""
    assert done_ratio((1.0, 1.0, 8.0), 96, 24) >= 0.65
