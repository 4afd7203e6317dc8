"""A leaving peer saves what the swarm shares within the time that it was given, whatever does not end."""

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2ptrain.cli.local_swarm import DRAIN_SECONDS
from p2ptrain.config import PeerConfig
from p2ptrain.errors import CheckpointError, ResourceError
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.node import draining
from p2ptrain.node.draining import end_training, unless_stopped
from p2ptrain.node.process import StopSignals
from tests.support.coroutines import simulated

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 60.0


@pytest.fixture(autouse=True)
def nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what a test leaves behind from ending this process."""
    monkeypatch.setattr(draining, "left_behind", [])


class FakeTrainer:
    """A training thread that ends, or saves, when the test says so."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_saving = False
        self.is_saved = False
        self.unsaved: Exception | None = None
        self.stopped_with: float | None = None
        self.cancelled_at: float | None = None
        self.saved_at: list[float] = []
        self.failures: list[Exception] = []
        self.saver = SimpleNamespace(save_shared=self._save_shared)

    def stop(self, seconds: float) -> None:
        self.stopped_with = seconds

    def cancel(self, reason: str) -> None:
        self.cancelled_at = asyncio.get_running_loop().time()

    def _save_shared(self) -> Path:
        if self.failures:
            raise self.failures.pop()
        self.saved_at.append(asyncio.get_running_loop().time())
        return Path("checkpoint")

    async def end(self, network: SimulatedNetwork) -> None:
        bridge = SimpleNamespace(cancel=self.cancel)
        runtime = network.add_peer("peer").runtime
        await end_training(cast(Any, self), cast(Any, bridge), self.done, runtime, SECONDS)


@simulated()
async def test_a_round_that_does_not_end_is_given_up_after_a_third_and_the_thread_saves(
    network: SimulatedNetwork,
) -> None:
    trainer = FakeTrainer()
    trainer.is_saved = True
    network.loop.call_later(25.0, trainer.done.set_result, None)
    await trainer.end(network)
    assert network.loop.time() == 25.0
    assert trainer.cancelled_at == SECONDS / 3
    assert trainer.saved_at == []


@simulated(seed=2)
async def test_the_event_loop_saves_for_a_thread_that_is_stuck(network: SimulatedNetwork) -> None:
    trainer = FakeTrainer()
    trainer.failures = [CheckpointError("between two rounds")]
    await trainer.end(network)
    assert len(trainer.saved_at) == 1
    assert SECONDS / 2 < trainer.saved_at[0] < SECONDS / 2 + 1
    assert network.loop.time() < SECONDS


@simulated(seed=7)
async def test_the_event_loop_saves_for_a_thread_that_failed(network: SimulatedNetwork) -> None:
    trainer = FakeTrainer()
    trainer.done.set_exception(ZeroDivisionError("a defect"))
    await trainer.end(network)
    assert trainer.saved_at == [0.0]
    assert trainer.done.exception() is not None


@simulated(seed=3)
async def test_nobody_saves_beside_a_thread_that_is_saving(network: SimulatedNetwork) -> None:
    trainer = FakeTrainer()
    trainer.is_saving = True
    await trainer.end(network)
    assert trainer.saved_at == []


@pytest.mark.parametrize("where", ["thread", "event loop"])
@simulated(seed=4)
async def test_a_checkpoint_that_is_not_written_is_an_error(network: SimulatedNetwork, where: str) -> None:
    trainer = FakeTrainer()
    if where == "thread":
        trainer.unsaved = ResourceError("the disk is full")
        trainer.done.set_result(None)
    else:
        trainer.failures = [ResourceError("the disk is full")]
    with pytest.raises(ResourceError, match="the disk is full"):
        await trainer.end(network)


@simulated(seed=5)
async def test_a_start_ends_when_the_peer_is_told_to_stop(network: SimulatedNetwork) -> None:
    signals = StopSignals()
    network.loop.call_later(5.0, signals.stop, "signal")
    assert await unless_stopped(asyncio.sleep(60.0, "ready"), signals) is None
    assert network.loop.time() == 5.0
    assert await unless_stopped(asyncio.sleep(60.0, "ready"), StopSignals()) == "ready"


def test_what_stops_peers_waits_longer_than_they_take() -> None:
    needed = float(PeerConfig.model_fields["drain_seconds"].default) + 10
    places = {
        "deploy/systemd/p2ptrain@.service": r"^TimeoutStopSec=(\d+)$",
        "docs/how-to/systemd.md": r"^TimeoutStopSec=(\d+)$",
        "compose.yaml": r"stop_grace_period: (\d+)s$",
        "compose.stages.yaml": r"stop_grace_period: (\d+)s$",
        "deploy/public/compose.yaml": r"stop_grace_period: (\d+)s$",
    }
    for place, pattern in places.items():
        found = re.findall(pattern, (ROOT / place).read_text(), re.MULTILINE)
        assert found, place
        assert min(map(int, found)) >= needed, place
    assert needed <= DRAIN_SECONDS
