"""A `SwarmOptimizer` whose swarm is this process alone: every contribution is applied at once, without a network."""

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.manifest import Manifest, TrainingSpec
from p2ptrain.node.thread import LoopThread
from p2ptrain.training.bridge import Bridge
from p2ptrain.training.checkpoints import SavePolicy
from p2ptrain.training.checkpoints.saving import Saver
from p2ptrain.training.learning_rate import Schedule, WrappedOptimizer
from p2ptrain.training.local_update import LocalContribution
from p2ptrain.training.optimizer import SwarmOptimizer
from p2ptrain.training.state.initial_state import initial_state
from p2ptrain.training.state.shared_state import SharedState
from p2ptrain.training.sync.synchronizer import RoundResult
from tests.support.settings import training_over

PEER = "me"


class LoneSynchronizer:
    """The part of `Synchronizer` that an optimizer and a saver use.

    ``forgot`` has the parts of which the saver said that work of an earlier process waits. With ``fail_rounds`` it
    commits nothing.
    """

    def __init__(self, state: SharedState, spec: TrainingSpec) -> None:
        self.state = state
        residual = torch.arange(state.layout.num_values, dtype=torch.float32, device="cpu")
        self.feedback = SimpleNamespace(residual=residual)
        self.averager = SimpleNamespace(contributions=self)
        self.replica = self.pacing = self
        self.context = SimpleNamespace(participation=1.0, secure_aggregation=None)
        self.position = SimpleNamespace(is_closing=False)
        self.forgot: list[int] = []
        self.fail_rounds = False
        self.place: tuple[int, int] | None = (0, 1)
        self._global_batch, self._every = spec.global_batch, spec.steps_per_round

    @property
    def head(self) -> Head:
        return self.state.head

    def forget(self, waiting: Any = ()) -> None:
        self.forgot += waiting

    def restore_residual(self, residual: torch.Tensor) -> None:
        self.feedback.residual.copy_(residual)

    def note(self, steps: int, seconds: float = 0.0, call_soon: object = None) -> None:
        """It needs no pace."""

    def is_due(self, steps: int) -> bool:
        return steps >= self._every

    async def report_batch(self, samples: int, batch_samples: int, batch_seconds: float) -> bool:
        return samples >= self._global_batch

    async def reset(self, work: LocalContribution) -> None:
        work.reset()

    async def synchronize(self, work: LocalContribution) -> RoundResult:
        head, fragment = self.head, self.state.fragments.of_round(self.head.round)
        if self.fail_rounds:
            return RoundResult(False, head.round, "the test says so")
        contribution = torch.empty(fragment.num_values)
        counted = work.tokens_of(fragment), work.samples
        work.collect(contribution, fragment)
        self.state.apply(contribution, head.round, fragment)
        work.adopt(True, None, fragment, counted)
        self.state.head = dataclasses.replace(
            head, round=head.round + 1, tokens=head.tokens + counted[0], samples=head.samples + counted[1],
            digest=self.state.tree().root, members=(PEER,),
        )  # fmt: skip
        return RoundResult(True, self.head.round, "", contributed=True, members=1, contributors=1)


@dataclasses.dataclass
class LonePeer:
    """An optimizer as `Swarm.optimizer` makes it, without its network."""

    module: torch.nn.Module
    optimizer: SwarmOptimizer
    synchronizer: LoneSynchronizer
    saver: Saver


@contextmanager
def lone_peer(
    directory: Path,
    module: torch.nn.Module,
    inner: torch.optim.Optimizer,
    policy: SavePolicy | None = None,
    clip_norm: float = 0.0,
    **training: Any,
) -> Iterator[LonePeer]:
    manifest = Manifest.model_validate(
        {"name": "lone", "model": {"family": "custom"}, "data": {"source": "custom"}, "training": training}
    )
    thread = LoopThread()
    try:
        wrapped = WrappedOptimizer(inner, clip_norm=clip_norm)
        state = initial_state(module, wrapped, manifest, manifest.digest)
        synchronizer: Any = LoneSynchronizer(state, manifest.training)
        optimizer = SwarmOptimizer(module, wrapped, synchronizer, Bridge(thread.loop), manifest.training, 10)
        saver = Saver(directory, policy or SavePolicy(), optimizer, manifest.digest)
        yield LonePeer(module, optimizer, synchronizer, saver)
        saver.close()
    finally:
        thread.stop()


class InlineBridge(Bridge):
    def __init__(self) -> None:
        """No loop is needed."""

    def is_over(self) -> bool:
        return False

    def call_soon(self, callback: Callable[..., object], *values: object) -> None:
        callback(*values)

    def start(self, coroutine: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(asyncio.run(coroutine))
        except Exception as error:
            future.set_exception(error)
        return future


@dataclasses.dataclass
class LoneOptimizer:
    """An optimizer as `lone_optimizer` makes it, with the learning rate of each step of the wrapped optimizer."""

    module: torch.nn.Module
    optimizer: SwarmOptimizer
    synchronizer: LoneSynchronizer
    applied_rates: list[float] = dataclasses.field(default_factory=list)

    def step(self, gradient: float = 1.0) -> None:
        for parameter in self.module.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        self.optimizer.step()
        self.optimizer.zero_grad()


def sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def lone_optimizer(
    schedule: Schedule | None = None,
    round_: int = 0,
    make: Callable[[torch.nn.Module], torch.optim.Optimizer] = sgd,
    module: torch.nn.Module | None = None,
    clip_norm: float = 0.0,
    **training: Any,
) -> LoneOptimizer:
    """Make an optimizer of a swarm of one, without threads, around SGD of rate 0.1 unless told otherwise.

    ``training`` is the manifest's section, ``round_`` the round in progress.
    """
    module = module or torch.nn.Linear(3, 2)
    usual = {"local_batch": 1, "global_batch": 1, "outer_learning_rate": 1.0}
    manifest = Manifest.model_validate({"name": "lone", "training": training_over(usual, training)})
    inner = make(module)
    wrapped = WrappedOptimizer(inner, schedule, clip_norm)
    state = initial_state(module, wrapped, manifest, manifest.digest)
    state.head = dataclasses.replace(state.head, round=round_)
    synchronizer: Any = LoneSynchronizer(state, manifest.training)
    optimizer = SwarmOptimizer(module, wrapped, synchronizer, InlineBridge(), manifest.training, 10)
    lone = LoneOptimizer(module, optimizer, synchronizer)
    inner.register_step_pre_hook(lambda *_: lone.applied_rates.append(float(inner.param_groups[0]["lr"])))
    return lone
