"""Rounds under compute: who has the model when, what is applied how, and what is still to be contributed."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from p2ptrain.errors import TemporaryError
from p2ptrain.manifest import TrainingSpec
from p2ptrain.training.bridge import Bridge
from p2ptrain.training.learning_rate import LearningRates, WrappedOptimizer
from p2ptrain.training.local_update import LocalContribution, ModelLock
from p2ptrain.training.optimizer import SwarmOptimizer
from p2ptrain.training.state.layout import Fragments, Layout
from p2ptrain.training.state.outer_optimizers import AverageStep
from p2ptrain.training.state.shared_state import SharedState
from p2ptrain.training.sync.synchronizer import RoundResult

WAIT_SECONDS = 20.0


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop on a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(WAIT_SECONDS)
    loop.close()


def _shared(num_fragments: int = 1) -> tuple[nn.Module, SharedState]:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    layout = Layout.from_module(module)
    return module, SharedState(module, layout, AverageStep(layout, 1.0), Fragments(layout, num_fragments))


def _read(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def test_a_result_is_mixed_in_and_later_work_is_still_to_be_contributed() -> None:
    module, state = _shared(2)
    work = LocalContribution(module, state, accumulate=False, mixing=0.25)
    fragment = state.fragments.of_round(1)
    work.add_step(4, 40)
    work.add_step(4, 40)
    handed_in = work.tokens_of(fragment)
    work.add_step(4, 40)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
    live, start = _read(module), state.vector.clone()
    mean = torch.full((fragment.num_values,), -0.5)
    state.apply(mean, 0, fragment)
    work.adopt(True, None, fragment, (handed_in, 8))
    assert handed_in == 40
    assert (work.pending, work.samples) == ([120, 40], 4)
    (span,) = fragment.parameter_spans
    own = slice(span[0], span[0] + span[2])
    expected = live.clone()
    expected[own] = 0.25 * live[own] + 0.75 * (start[own] + 0.5)
    torch.testing.assert_close(_read(module), expected)


def test_whoever_synchronises_gets_the_model_between_two_steps(loop: asyncio.AbstractEventLoop) -> None:
    lock, events = ModelLock(), []

    async def touch() -> None:
        async with lock:
            events.append("held")
            await asyncio.sleep(0)
            events.append("given back")

    lock.acquire(lambda: False)
    future = asyncio.run_coroutine_threadsafe(touch(), loop)
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(WAIT_SECONDS)
    events.append("step")
    lock.release()
    lock.acquire(lambda: False)
    events.append("next step")
    future.result(WAIT_SECONDS)
    assert events == ["step", "held", "given back", "next step"]


def test_training_waits_for_what_the_model_is_reserved_for(loop: asyncio.AbstractEventLoop) -> None:
    lock = ModelLock()

    async def touch() -> str:
        async with lock:
            return "touched"

    lock.reserve()
    future = asyncio.run_coroutine_threadsafe(touch(), loop)
    lock.acquire(lambda: False)
    assert future.done() or future.result(WAIT_SECONDS) == "touched"
    lock.release()
    lock.reserve()
    lock.end_reservation()
    lock.acquire(lambda: False)


def test_training_ends_when_the_other_side_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.training.local_update.POLL_SECONDS", 0.01)
    lock = ModelLock()
    lock.reserve()
    with pytest.raises(TemporaryError, match="closed during a round"):
        lock.acquire(lambda: True)


def test_who_gives_up_waiting_for_the_model_does_not_keep_it(loop: asyncio.AbstractEventLoop) -> None:
    lock = ModelLock()

    async def touch() -> None:
        async with lock:
            raise AssertionError("it was cancelled before")

    async def cancelled() -> None:
        task = asyncio.create_task(touch())
        await asyncio.sleep(0)
        lock.release()  # Granted, but the task learns of its cancellation first.
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    lock.acquire(lambda: False)
    asyncio.run_coroutine_threadsafe(cancelled(), loop).result(WAIT_SECONDS)
    lock.acquire(lambda: False)


@dataclass
class ScriptedSynchronizer:
    """Reads the contribution, waits for the test, and then gives the result that it is told."""

    state: SharedState
    steps_per_round: int
    head: Any = field(default_factory=lambda: SimpleNamespace(round=0))
    begun: list[list[int]] = field(default_factory=list)
    arrivals: SimpleQueue[Future[RoundResult]] = field(default_factory=SimpleQueue)

    @property
    def replica(self) -> SimpleNamespace:
        """All take part in each round."""
        return SimpleNamespace(context=SimpleNamespace(participation=1.0))

    @property
    def pacing(self) -> SimpleNamespace:
        """It needs no pace."""
        return SimpleNamespace(note=lambda *values, **named: None)

    def is_due(self, steps: int) -> bool:
        return steps >= self.steps_per_round

    async def synchronize(self, work: LocalContribution) -> RoundResult:
        fragment = self.state.fragments.of_round(self.head.round)
        contribution = torch.empty(fragment.num_values)
        async with work.model_lock:
            counted = work.tokens_of(fragment), work.samples
            self.begun.append(list(work.pending))
            work.collect(contribution, fragment)
        arrival: Future[RoundResult] = Future()
        self.arrivals.put(arrival)
        result = await asyncio.wrap_future(arrival)
        async with work.model_lock:
            if result.committed:
                self.state.apply(contribution, self.head.round, fragment)
                self.head.round += 1
                work.adopt(True, None, fragment, counted)
        return result

    def arrive(self, result: RoundResult) -> None:
        """End the round in progress, once its contribution was read."""
        self.arrivals.get(timeout=WAIT_SECONDS).set_result(result)


def _optimizer(loop: asyncio.AbstractEventLoop, **spec: Any) -> tuple[SwarmOptimizer, ScriptedSynchronizer]:
    module, state = _shared(spec.get("fragments", 1))
    training = TrainingSpec.model_validate({"local_batch": 1, **spec})
    synchronizer = ScriptedSynchronizer(state, training.steps_per_round)
    inner = torch.optim.SGD(module.parameters(), lr=0.1)
    return SwarmOptimizer(module, WrappedOptimizer(inner), synchronizer, Bridge(loop), training, 10), synchronizer  # type: ignore[arg-type]


def _step(optimizer: SwarmOptimizer, times: int = 1) -> None:
    for _ in range(times):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()


def _committed(round_: int) -> RoundResult:
    return RoundResult(True, round_, "", contributed=True)


def test_steps_go_on_under_a_round_and_count_for_the_next(loop: asyncio.AbstractEventLoop) -> None:
    optimizer, synchronizer = _optimizer(loop, every=8, fragments=2, overlap_steps=3)
    _step(optimizer, 4)
    assert [optimizer.is_round_running] == [True]
    assert synchronizer.begun == [[40, 40]]
    _step(optimizer, 2)
    assert [optimizer.last_result] == [None]
    synchronizer.arrive(_committed(1))
    _step(optimizer)
    assert [optimizer.last_result] == [_committed(1)]
    assert optimizer.work.samples == 3
    _step(optimizer)
    assert synchronizer.begun == [[40, 40], [40, 80]]
    synchronizer.arrive(_committed(2))
    assert optimizer.synchronize().round == 2
    assert [optimizer.is_round_running] == [False]


def test_training_waits_for_a_round_that_takes_longer_than_the_overlap(loop: asyncio.AbstractEventLoop) -> None:
    optimizer, synchronizer = _optimizer(loop, every=4, overlap_steps=2)
    _step(optimizer, 5)
    trained = threading.Thread(target=_step, args=(optimizer,))
    trained.start()
    trained.join(0.2)
    assert trained.is_alive()
    synchronizer.arrive(_committed(1))
    trained.join(WAIT_SECONDS)
    assert optimizer.last_result == _committed(1)


def test_a_round_that_fails_under_compute_leaves_all_work_for_the_next(loop: asyncio.AbstractEventLoop) -> None:
    optimizer, synchronizer = _optimizer(loop, every=8, overlap_steps=1)
    _step(optimizer, 8)
    before, live = synchronizer.state.vector.clone(), _read(optimizer.module)
    synchronizer.arrive(RoundResult(False, 0, "it broke"))
    _step(optimizer)
    assert optimizer.last_result is not None
    assert not optimizer.last_result.committed
    assert torch.equal(synchronizer.state.vector, before)
    torch.testing.assert_close(_read(optimizer.module), live - 0.1)
    _step(optimizer, 2)
    assert synchronizer.begun == [[80], [110]]
    synchronizer.arrive(_committed(1))
    optimizer.synchronize()


def test_the_swarms_steps_go_on_under_a_round(loop: asyncio.AbstractEventLoop) -> None:
    optimizer, synchronizer = _optimizer(loop, every=4, overlap_steps=2)
    seen: list[float] = []
    optimizer._rates = LearningRates(optimizer.inner, float)
    optimizer.inner.register_step_pre_hook(lambda *_: seen.append(optimizer.inner.param_groups[0]["lr"]))
    _step(optimizer, 5)
    synchronizer.arrive(_committed(1))
    _step(optimizer, 2)
    assert seen == pytest.approx([0.1 * step for step in range(7)])


def test_a_closed_swarm_ends_a_round_under_compute(loop: asyncio.AbstractEventLoop) -> None:
    optimizer, _ = _optimizer(loop, every=4, overlap_steps=2)
    _step(optimizer, 4)
    optimizer._bridge.cancel("the network ended")
    with pytest.raises(TemporaryError, match="the network ended"):
        _step(optimizer, 2)
