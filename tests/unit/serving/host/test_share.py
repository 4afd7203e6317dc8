"""The share of time that batches take beside training holds under load."""

import asyncio
from typing import Any

import pytest

from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.serving.host.executor import Executor
from p2ptrain.serving.host.share import BURST_SECONDS, ComputeShare
from tests.support.coroutines import simulated


class Busy(Executor):
    """Has always another batch, which takes ``batch_seconds``."""

    def __init__(self, network: SimulatedNetwork, batch_seconds: float) -> None:
        super().__init__(network.add_peer("host").runtime, 0)
        self.batch_seconds, self.computed, self.is_training = batch_seconds, 0.0, True

    def _next(self) -> Any:
        return (0, bytes(32)), []

    async def _compute(self, key: Any, shares: Any) -> None:
        await asyncio.sleep(self.batch_seconds)
        self.computed += self.batch_seconds

    async def run_for(self, seconds: float) -> float:
        """Return the seconds of computing within some seconds."""
        before = self.computed
        self.wake()
        task = asyncio.create_task(self.run())
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return self.computed - before


@pytest.mark.parametrize("batch_seconds", [0.02, 0.3, 6.0])
@pytest.mark.parametrize("share", [0.1, 0.5])
@simulated(seed=1)
async def test_batches_take_their_share_under_load_and_no_more(
    network: SimulatedNetwork, share: float, batch_seconds: float
) -> None:
    host = Busy(network, batch_seconds)
    host.share = ComputeShare(share, lambda: host.is_training)
    seconds = 400.0
    computed = await host.run_for(seconds)
    assert 0.95 * share * seconds - batch_seconds <= computed <= share * seconds + BURST_SECONDS + batch_seconds


@simulated(seed=1)
async def test_while_the_peer_does_not_train_batches_take_all_time(network: SimulatedNetwork) -> None:
    host = Busy(network, 0.3)
    host.share = ComputeShare(0.1, lambda: host.is_training)
    await host.run_for(60.0)
    host.is_training = False
    assert await host.run_for(60.0) >= 59.0
    host.is_training = True
    assert await host.run_for(60.0) <= 0.1 * 60.0 + BURST_SECONDS + 0.3


@simulated(seed=1)
async def test_a_wait_ends_soon_after_training(network: SimulatedNetwork) -> None:
    share = ComputeShare(0.01, lambda: training)
    training = True
    await share.wait()
    share.spend(100.0)
    waiting = asyncio.create_task(share.wait())
    await asyncio.sleep(30.0)
    assert not waiting.done()
    training = False
    await asyncio.sleep(BURST_SECONDS)
    assert waiting.done()


@simulated(seed=1)
async def test_an_answer_after_a_rest_does_not_wait(network: SimulatedNetwork) -> None:
    loop, share = asyncio.get_running_loop(), ComputeShare(0.25, lambda: True)
    await share.wait()
    share.spend(30.0)
    await asyncio.sleep(30.0 / 0.25)
    began = loop.time()
    for _ in range(int(0.9 * BURST_SECONDS / 0.02)):
        await share.wait()
        share.spend(0.02)
    assert loop.time() == began
