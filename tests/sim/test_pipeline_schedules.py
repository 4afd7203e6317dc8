"""Random faults in simulated pipelines: what counts, counts once; nothing that was reported done is missing."""

from __future__ import annotations

import asyncio
import random

import pytest

from p2ptrain.network.simulated import SimulatedNetwork, simulate
from tests.support.counting import PLACES, CountedPipeline
from tests.support.pipelines import PipelinePeer, make_manifest
from tests.support.simulation import until

FAULTS = ("crash", "crash", "stall", "restart", "trainer")


def head_of(peer: PipelinePeer) -> int:
    """The round that a host is in."""
    assert peer.hosted is not None
    return peer.hosted.units[0].round


async def befall(pipeline: CountedPipeline, generator: random.Random, gone: list[PipelinePeer]) -> None:
    """One fault, of which every stage keeps a host that is well."""
    network, fault = pipeline.network, generator.choice(FAULTS)
    if fault == "restart" and gone:
        peer = gone.pop(generator.randrange(len(gone)))
        pipeline.peers.remove(peer)
        await pipeline.begin(network.restart(peer.peer), peer.stage, 0.05)
        return
    if fault == "trainer":
        trainers = [peer for peer in pipeline.alive if peer.feeder is not None]
        if len(trainers) > 1:
            network.crash(trainers[generator.randrange(len(trainers))].peer)
        return
    stage = generator.randrange(pipeline.plan.num_stages)
    well = [peer for peer in pipeline.alive if peer.stage == stage and not network.loop.is_frozen(peer.peer)]
    if len(well) < 2:
        return
    victim = generator.choice(well)
    # What only the victim has would be lost: who was stopped, or has just come, may be behind.
    if max(head_of(peer) for peer in well if peer is not victim) < head_of(victim):
        return
    if fault == "crash":
        network.crash(victim.peer)
        gone.append(victim)
    else:
        network.stall(victim.peer, generator.choice((0.3, 3.0, 20.0)))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_fails_each_microbatch_counts_once_and_what_is_done_is_everywhere(seed: int) -> None:
    generator = random.Random(f"pipeline {seed}")

    async def main(network: SimulatedNetwork) -> None:
        num_stages = generator.choice((2, 2, 3, 4, 8))
        replicas = generator.choice((2, 3)) if num_stages < 8 else 2
        pipeline = CountedPipeline(network, make_manifest(num_stages, layers=6, global_batch=12, local_batch=1))
        for stage in range(num_stages):
            for number in range(replicas):
                await pipeline.add(f"host{stage}.{number}", stage, 0.05)
        for number in range(generator.choice((1, 2))):
            await pipeline.add(f"trainer{number}", None)
        trainers = [peer for peer in pipeline.peers if peer.feeder is not None]
        share = PLACES // 2 // len(trainers)
        feeding = [
            asyncio.create_task(pipeline.feed(trainer, range(share * number, share * number + 60), at_once=8))
            for number, trainer in enumerate(trainers)
        ]
        gone: list[PipelinePeer] = []
        for _ in range(generator.randrange(3, 9)):
            await asyncio.sleep(generator.choice((0.2, 2.0, 10.0)) * generator.random())
            await befall(pipeline, generator, gone)
        await asyncio.gather(*feeding)
        # Whatever befell it, the pipeline goes on, and comes to rest with all of a stage's hosts in one place.
        trainer = await pipeline.add("late trainer", None)
        results = await pipeline.feed(trainer, range(PLACES - 60, PLACES), at_once=8)
        assert sum(accepted is not None for accepted in results.values()) > 50, trainer.feeder
        await until(lambda: len(trainer.done) > 36, 120.0)
        await until(lambda: pipeline.is_level(), 120.0)
        pipeline.check()
        await pipeline.close()

    simulate(main, seed)


@pytest.mark.parametrize("fault", ["", "crash", "stall"])
@pytest.mark.parametrize("seed", range(2))
def test_hosts_move_to_where_they_are_missed_and_no_stage_is_left_alone(seed: int, fault: str) -> None:
    async def main(network: SimulatedNetwork) -> None:
        pipeline = CountedPipeline(network, make_manifest(3, layers=6, global_batch=12, local_batch=1), may_move=True)
        for number, stage in enumerate((0, 0, 0, 0, 0, 1, 1, 1, 2)):
            await pipeline.add(f"host{number}", stage, 0.4)
        trainer = await pipeline.add("trainer", None)
        feeding = asyncio.create_task(pipeline.feed(trainer, range(900), at_once=6))

        def hosts() -> list[int]:
            return sorted(peer.stage for peer in pipeline.alive if peer.stage is not None)

        least = {stage: 1 for stage in range(3)}
        harmed: list[PipelinePeer] = []

        async def watch() -> None:
            while True:
                for stage in least:
                    least[stage] = min(least[stage], hosts().count(stage))
                for peer in pipeline.alive:
                    if peer.is_moving and fault and not harmed:
                        harmed.append(peer)
                        network.crash(peer.peer) if fault == "crash" else network.stall(peer.peer, 30.0)
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        await until(lambda: hosts().count(2) >= 2, 600.0)
        assert min(least.values()) >= 1
        assert bool(harmed) == bool(fault)
        pipeline.is_stopping = True
        await feeding
        pipeline.is_stopping = False
        results = await pipeline.feed(trainer, range(PLACES - 36, PLACES), at_once=8)
        assert all(results.values())
        await until(pipeline.is_level, 120.0)
        watching.cancel()
        assert sum(len(peer.moves) for peer in pipeline.peers) <= 4  # No stampede, and no wandering about.
        pipeline.check()
        await pipeline.close()

    simulate(main, seed)
