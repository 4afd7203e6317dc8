"""Auxiliaries lend their bandwidth to the averaging of others: what they gain, and what they cannot do."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable

import pytest
import torch

from p2ptrain.averaging.certificate import Body
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.simulated import SimulatedNetwork, simulate
from tests.support.averagers import AveragingPeer, LendingPeer, start_averagers, start_lender, stop_averagers
from tests.support.simulation import until

NUM_VALUES = 300_000
SPEC = AveragingSpec(codec="fp32", aggregation="mean", grace_seconds=1.0, auxiliaries=2)
THIN, THICK = 5e5, 5e6
"""Bytes per second that trainers send with, and everybody else."""

Scenario = Callable[[SimulatedNetwork, list[AveragingPeer], list[LendingPeer]], Awaitable[None]]


def run(scenario: Scenario, *, trainers: int = 3, lenders: int = 2, seed: int = 1, spec: AveragingSpec = SPEC) -> None:
    """Trainers with thin uplinks and auxiliaries with thick ones, in a scenario."""

    async def main(network: SimulatedNetwork) -> None:
        peers = [
            network.add_peer(f"t{i}", up_bytes_per_second=THIN, down_bytes_per_second=THICK) for i in range(trainers)
        ]
        started = await start_averagers(network, peers, spec, NUM_VALUES)
        lent = [
            await start_lender(
                network.add_peer(f"a{i}", up_bytes_per_second=THICK, down_bytes_per_second=THICK), started
            )
            for i in range(lenders)
        ]
        try:
            await scenario(network, started, lent)
        finally:
            for each in lent:
                await each.stop()
            await stop_averagers(started)

    simulate(main, seed)


async def average(started: list[AveragingPeer], lent: list[LendingPeer], count: int = 1) -> list[Body]:
    """All trainers average so many times, having computed for a second; what each round's result was."""
    bodies = []
    for _ in range(count):
        for each in lent:
            each.introduce()
        await asyncio.sleep(1.0)
        await asyncio.gather(*(each.round_until_committed() for each in started))
        told = {each.outcomes[-1].result.certificate.body for each in started}
        assert len(told) == 1
        bodies.append(told.pop())
    return bodies


def lent_share(body: Body) -> float:
    """How much of the vector auxiliaries owned."""
    return 1 - body.bounds[len(body.members)] / body.bounds[-1]


def test_auxiliaries_own_shares_and_the_mean_is_exactly_what_it_is_without_them() -> None:
    means = []

    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer], lent: list[LendingPeer]) -> None:
        for index, each in enumerate(started):  # Sums of whole numbers do not depend on their order.
            each.vector = torch.arange(NUM_VALUES, dtype=torch.float32) % 97 * (index + 1)
            each.follow()
        for each in lent:
            each.introduce()
        await asyncio.sleep(1.0)
        tokens = (10, 10, 20)  # Weights that are exact, too.
        await asyncio.gather(*(each.round(count) for each, count in zip(started, tokens, strict=True)))
        body = started[0].outcomes[-1].result.certificate.body
        assert len(body.auxiliaries) == len(lent)
        assert lent_share(body) == (0.5 if lent else 0.0)
        means.extend(each.mean() for each in started)

    run(scenario)
    run(scenario, lenders=0)
    assert len(means) == 6
    assert all(torch.equal(mean, means[0]) for mean in means)
