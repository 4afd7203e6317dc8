"""Swarms larger than a group: cells, delegates, and how everybody comes to the same result."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import torch

from p2ptrain.averaging.cells import Cells
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.simulated import SimulatedNetwork, simulate
from tests.support.averagers import AveragingPeer, start_averagers, stop_averagers

NUM_VALUES = 512
SPEC = AveragingSpec(codec="fp32", aggregation="mean", group_size=8, grace_seconds=1.0)

Scenario = Callable[[SimulatedNetwork, list[AveragingPeer]], Awaitable[None]]


def run(num_peers: int, scenario: Scenario, seed: int = 1, spec: AveragingSpec = SPEC) -> None:
    async def main(network: SimulatedNetwork) -> None:
        peers = [network.add_peer(f"p{i}") for i in range(num_peers)]
        started = await start_averagers(network, peers, spec, NUM_VALUES)
        try:
            await scenario(network, started)
        finally:
            await stop_averagers(started)

    simulate(main, seed=seed)


async def grow(started: list[AveragingPeer]) -> None:
    """The first round, in which a group can only count those who do not fit in it."""
    await asyncio.gather(*(each.try_round() for each in started))
    assert max(len(each.outcomes) for each in started) == 1


def exact_mean(started: list[AveragingPeer]) -> torch.Tensor:
    return torch.stack([each.vector.double() for each in started]).mean(0).float()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_peers", [12, 24, 64])
def test_all_peers_come_to_the_exact_mean_of_all(num_peers: int, seed: int) -> None:
    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer]) -> None:
        await grow(started)
        for _ in range(2):
            await asyncio.gather(*(each.round() for each in started))
            bodies = {each.outcomes[-1].result.certificate.body.body_hash for each in started}
            assert len(bodies) == 1
            body = started[0].outcomes[-1].result.certificate.body
            assert body.levels == Cells(SPEC.group_size).num_levels(num_peers) > 1
            contributed = [each for each in started if each.outcomes[-1].contributed]
            assert len(contributed) >= 0.9 * num_peers, "a cell that overflows leaves some out, seldom"
            assert body.tokens == 10 * len(contributed)
            torch.testing.assert_close(started[0].mean(), exact_mean(contributed), rtol=1e-5, atol=1e-6)
            assert all(torch.equal(each.mean(), started[0].mean()) for each in started)
            places = sorted(each.outcomes[-1].place for each in started)
            assert places == [(rank, num_peers) for rank in range(num_peers)]

    run(num_peers, scenario, seed)
