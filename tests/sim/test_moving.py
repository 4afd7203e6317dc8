"""Hosts that move while others do: each says where it goes, and the others decide with that in mind."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from p2ptrain.network.simulated import SimulatedNetwork, simulate
from p2ptrain.training.hosted_stage import HostedStage
from tests.support.pipelines import Pipeline, PipelinePeer, make_manifest
from tests.support.simulation import until

DOWNLOAD_SECONDS = 60.0


def targets(pipeline: Pipeline) -> Counter[int]:
    """The stages to which hosts are on their way."""
    going = [(peer.mover.next_stage, peer.stage) for peer in pipeline.hosts if peer.mover is not None]
    return Counter(target for target, stage in going if target is not None and target != stage)


@pytest.mark.parametrize("seed", range(3))
def test_the_next_host_decides_while_another_still_downloads(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    take_on = PipelinePeer._take_on

    async def take_on_slowly(self: PipelinePeer, stage: int) -> HostedStage:
        await asyncio.sleep(DOWNLOAD_SECONDS)
        return await take_on(self, stage)

    monkeypatch.setattr(PipelinePeer, "_take_on", take_on_slowly)

    async def main(network: SimulatedNetwork) -> None:
        pipeline = Pipeline(network, make_manifest(3, layers=6), may_move=True)
        for number, stage in enumerate((0, 0, 0, 0, 0, 1, 2)):
            await pipeline.add(f"host{number}", stage)
        await until(lambda: targets(pipeline).total() == 2, 150.0)
        assert targets(pipeline) == {1: 1, 2: 1}, "to different stages"
        await asyncio.sleep(400.0)
        assert not targets(pipeline), "moves come to an end"
        assert min(Counter(peer.stage for peer in pipeline.hosts).values()) == 2
        assert max(len(peer.moves) for peer in pipeline.hosts) == 1, "nobody wanders about"
        await pipeline.close()

    simulate(main, seed)
