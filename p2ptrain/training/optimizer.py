"""`SwarmOptimizer`: an ordinary ``torch.optim.Optimizer`` whose steps are shared with the swarm.

With ``every = H`` each `SwarmOptimizer.step` is an inner step. A round is due after H steps per peer on average
(`p2ptrain.averaging.timing.local_steps`). The swarm then averages the pseudo-gradient (start of the round minus now)
and applies the outer step (DiLoCo, arXiv 2311.08105). With P fragments this happens every H / P steps, to one fragment
at a time (Streaming DiLoCo, arXiv 2501.18512).

With ``every = 1`` each call adds a local batch's gradient to an accumulator that ``zero_grad`` does not touch. When the
global batch is full, the swarm averages the gradient, and the wrapped optimizer takes the same step on all peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

import torch

from p2ptrain.errors import P2PTrainError, TemporaryError, UsageError
from p2ptrain.manifest import TrainingSpec
from p2ptrain.training.dropped_batches import DROPS_TO_BEGIN_ANEW, DroppedBatches
from p2ptrain.training.gradients import clip_gradients
from p2ptrain.training.learning_rate import LearningRates, SwarmScheduler
from p2ptrain.training.local_update import LocalContribution
from p2ptrain.training.loss_watch import LossWatch
from p2ptrain.training.optimizer_checks import check_layout_is_kept
from p2ptrain.training.sync.synchronizer import RoundResult, Synchronizer

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
"""Retry interval while the swarm is below its minimum of peers."""
MARK_SECONDS = 1.0
PACE_SECONDS = 15.0
"""Window of the tokens-per-second measurement."""
USE_SCHEDULE = (
    "give Swarm.optimizer a schedule=lambda round: factor in place of a scheduler of this peer; opt.scheduler() is for"
    " training loops that want to step one"
)

T = TypeVar("T")


class Bridge:
    """Runs coroutines on the network's event loop for the training thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._under_way: set[Future[Any]] = set()
        self._over = ""
        self._ended = threading.Event()

    def begin(self, work: Callable[[], object]) -> asyncio.Future[None]:
        """Run ``work`` on a daemon thread, which may outlive the loop; return a future of its end or error."""
        done: asyncio.Future[None] = self._loop.create_future()

        def finish(error: BaseException | None) -> None:
            if not done.done():
                done.set_exception(error) if error is not None else done.set_result(None)

        def run() -> None:
            error: Exception | None = None
            try:
                work()
            except Exception as caught:
                if not isinstance(caught, P2PTrainError):
                    logger.exception("training failed")
                error = caught
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(finish, error)

        threading.Thread(target=run, name="train", daemon=True).start()
        return done

    def cancel(self, reason: str = "the swarm is closing") -> None:
        """Cancel pending coroutines and refuse new ones, both with ``reason``; safe from any thread."""
        self._over = self._over or reason
        self._ended.set()
        for future in list(self._under_way):
            future.cancel()

    def rest(self, seconds: float) -> None:
        """Sleep on the calling thread; `cancel` ends the sleep."""
        self._ended.wait(seconds)

    def is_over(self) -> bool:
        """True after `cancel`, or once the loop is closed."""
        return bool(self._over) or self._loop.is_closed()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the coroutine's result, or raise `TemporaryError` if the network closes; an interrupt cancels it."""
        return self.finish(self.start(coroutine))

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the coroutine, whose result `finish` returns; raise `TemporaryError` if the network is closed."""
        if self.is_over():
            coroutine.close()
            raise TemporaryError(f"{self._over or 'the swarm is closed'}: call Swarm.join again to go on")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        if self.is_over():  # `cancel` ran before the future was registered.
            future.cancel()
        return future

    def tell(self, callback: Callable[..., object], *values: object) -> None:
        """Call ``callback`` on the event loop soon; do nothing once the network is closed."""
        if not self.is_over():
            with contextlib.suppress(RuntimeError):  # The loop was closed after the check.
                self._loop.call_soon_threadsafe(callback, *values)

    def finish(self, future: Future[T]) -> T:
        """Wait for a future of `start`, as `wait` does."""
        try:
            while True:
                try:
                    return future.result(timeout=1.0)
                except FutureTimeoutError:
                    if future.done() or self._loop.is_closed():
                        raise
        except FutureCancelledError as error:
            raise TemporaryError(self._over or "the swarm is closing") from error
        except BaseException:
            future.cancel()
            raise


class SwarmOptimizer(torch.optim.Optimizer):
    """Wraps a torch optimizer so that its steps are shared; made by `Swarm.optimizer`.

    Its parameter groups are those of the wrapped optimizer. Their learning rates follow the swarm's schedule, or are
    constant if ``rates`` is None. ``clip_norm`` limits the gradient's norm in each inner step (``every = H``), 0 for
    none; with ``every = 1`` the shared stepper clips. `count` overrides the sizes of one local batch.

    Attributes:
        inner: The wrapped optimizer.
        last_result: The last synchronisation's result; None before the first.
        total_steps: Local batches of this peer, those before a restart included.
        loss: Loss of a recent batch, for monitoring: from the closure, the caller, or the model's outputs.
        samples_per_step: Samples in one local batch.
        on_step: Called on the training thread at the end of each `step`; model and shared state do not change
            meanwhile.
        on_pause: Called by `step` with each result below the swarm's minimum of peers, if the manifest pauses then. It
            sleeps a while, and returns True to wait longer.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        inner: torch.optim.Optimizer,
        synchronizer: Synchronizer,
        bridge: Bridge,
        spec: TrainingSpec,
        tokens_per_step: int,
        clip_norm: float = 0.0,
        rates: LearningRates | None = None,
    ) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self._are_groups_final = True
        self.inner = inner
        self.state = inner.state
        self.last_result: RoundResult | None = None
        self._module = module
        self._synchronizer = synchronizer
        self._bridge = bridge
        self._every = spec.every
        self._steps_per_round = spec.steps_per_round
        self._clip_norm = clip_norm
        self._rates = rates or LearningRates(inner)
        self._warned_of_rates = False
        self._dropped = DroppedBatches()
        self._overlap_steps = spec.overlap_steps
        mixing = spec.mixing if spec.overlap_steps else None
        own = None if spec.every == 1 else inner
        self._work = LocalContribution(module, synchronizer.state, accumulate=spec.every == 1, mixing=mixing, inner=own)
        self._flight: Future[RoundResult] | None = None
        self.samples_per_step = spec.local_batch
        self.on_step: Callable[[], None] = lambda: None
        self._default_tokens = tokens_per_step
        self._counted: tuple[int, int] | None = None
        self._first_step = 0
        self._total_tokens = 0
        self.total_steps = 0
        self._loss: float | None = None
        self._is_loss_set = False
        self._loss_seen_at = -MARK_SECONDS
        self._loss_watch = LossWatch(module)
        self._batch_began = time.monotonic()
        self._marks = deque([(self._batch_began, 0)])
        self.on_pause: Callable[[RoundResult], bool] = self._rest

    @property
    def round(self) -> int:
        return self._synchronizer.head.round

    @property
    def committed(self) -> bool:
        return self.last_result is not None and self.last_result.committed

    @property
    def work(self) -> LocalContribution:
        return self._work

    @property
    def is_inner_shared(self) -> bool:
        """True if the wrapped optimizer's state is part of the shared state (``every = 1``)."""
        return self._every == 1

    @property
    def dropped_batches(self) -> int:
        """Number of batches dropped because their gradient was not finite."""
        return self._dropped.total

    @property
    def is_under_way(self) -> bool:
        """True if a round runs under compute."""
        return self._flight is not None

    @property
    def steps_in_round(self) -> int:
        """Local steps of the round in progress, without those pending from earlier ones."""
        return max(0, self._work.steps - self._first_step)

    @property
    def samples_in_round(self) -> int:
        return self._work.samples

    @property
    def tokens_in_round(self) -> int:
        return self._work.tokens

    @property
    def total_tokens(self) -> int:
        return self._total_tokens

    @property
    def tokens_per_second(self) -> float:
        """Recent tokens per second, round waits included; safe from any thread."""
        since, before = self._marks[0]
        seconds = time.monotonic() - since
        return (self._total_tokens - before) / seconds if seconds >= MARK_SECONDS else 0.0

    def _mark(self, now: float) -> None:
        if now - self._marks[-1][0] >= MARK_SECONDS:
            self._marks.append((now, self._total_tokens))
            while len(self._marks) > 2 and now - self._marks[1][0] > PACE_SECONDS:
                self._marks.popleft()

    @property
    def loss(self) -> float | None:
        return self._loss

    @loss.setter
    def loss(self, value: float | None) -> None:
        self._loss, self._is_loss_set = value, value is not None

    def _see_loss(self, told: Any, now: float) -> None:
        """Record a batch's loss; from a GPU at most every `MARK_SECONDS`, because reading it waits for the GPU."""
        observed = self._loss_watch.take()
        loss = observed if told is None and not self._is_loss_set else told
        is_near = not isinstance(loss, torch.Tensor) or loss.device.type == "cpu"
        if loss is not None and (is_near or now - self._loss_seen_at >= MARK_SECONDS):
            self._loss = loss.item() if isinstance(loss, torch.Tensor) else float(loss)
            self._loss_seen_at = now

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise `UsageError`: peers share the parameters of the time when this optimizer was made."""
        if getattr(self, "_are_groups_final", False):
            raise UsageError(
                "a swarm's optimizer takes no more parameters: add the group to the torch optimizer before"
            )
        super().add_param_group(param_group)

    def count(self, samples: int, tokens: int) -> None:
        """Set the size of the next local batch, if it differs from the default."""
        if samples < 1 or tokens < 1:
            raise ValueError(f"a batch has at least one sample and token, not {samples} and {tokens}")
        self._counted = (samples, tokens)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Count one local batch, and synchronise when the round is due; return the closure's loss, if any.

        If the manifest pauses below the minimum of peers, the call waits for more peers. With ``overlap_steps`` a due
        round starts here and runs while the caller computes; a later call applies its result. A batch whose gradient is
        not finite takes no step and does not count.

        Raises:
            TemporaryError: The swarm was closed, or its network ended.
            DivergedError: Too many batches or contributions of this peer were dropped in a row.
            UsageError: With ``every = 1``: other code than the swarm's schedule changed a learning rate.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._see_loss(loss, time.monotonic())
        samples, tokens = self._counted or (self.samples_per_step, self._default_tokens)
        self._counted = None
        self._follow_schedule()
        limit = self._clip_norm if self._every > 1 and self._clip_norm else math.inf
        if math.isfinite(clip_gradients(self._trained(), limit)):
            self._take_step(samples, tokens)
        else:
            self._drop_batch()
        self._look_after_flight()
        if self._flight is None and self._is_due(samples, time.monotonic() - self._batch_began):
            if self._overlap_steps:
                self._take_off()
            else:
                self._synchronize_when_enough()
        self._batch_began = time.monotonic()
        self._mark(self._batch_began)
        self.on_step()
        return loss

    def _trained(self) -> list[torch.Tensor]:
        if self._every == 1:
            return [parameter for _, parameter in self._synchronizer.state.layout.parameters_of(self._module)]
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _take_step(self, samples: int, tokens: int) -> None:
        self._dropped.in_a_row = 0
        if self._every == 1:
            self._work.add_gradients(tokens)
        else:
            self.inner.step()
        self._work.add_step(samples, tokens)
        self._total_tokens += tokens
        self.total_steps += 1

    def _drop_batch(self) -> None:
        self._dropped.note(self.round)
        self._work.mend_buffers()
        if self._dropped.in_a_row == DROPS_TO_BEGIN_ANEW:
            if self._flight is not None:
                self.synchronize()
            self._bridge.wait(self._synchronizer.replica.begin_anew(self._work))
            logger.warning("round %d: this peer begins anew from the state of the swarm", self.round)

    @property
    def _swarm_step(self) -> int:
        """The step that the learning rate follows; steps beyond the manifest's stay at the round's last step."""
        round_ = self.round + int(self.is_under_way)
        return round_ * self._steps_per_round + min(self._work.steps, self._steps_per_round - 1)

    def _follow_schedule(self) -> None:
        if change := self._rates.change():
            if self._every == 1:
                raise UsageError(f"{change}, and with every = 1 all peers need the rate of the round: {USE_SCHEDULE}")
            if not self._warned_of_rates:
                self._warned_of_rates = True
                effect = "the swarm's schedule" if self._rates.are_scheduled else "a peer that joins later"
                logger.warning("%s; %s sets another one: %s", change, effect, USE_SCHEDULE)
        if self._every == 1 or self._rates.are_scheduled:
            self._rates.set(self._swarm_step)

    def scheduler(self) -> SwarmScheduler:
        """Return the swarm's schedule as a torch scheduler, for training loops that step one."""
        return SwarmScheduler(self, self._rates, lambda: self._swarm_step)

    def _synchronize_when_enough(self) -> None:
        result = self.synchronize()
        if result.paused:
            logger.warning("round %d: paused: %s", result.round, result.reason)
        while result.paused and self.on_pause(result):
            result = self.synchronize()

    def _take_off(self) -> None:
        """Start a round under compute; return once it has read the contribution."""
        self._check_layout()
        self._work.steps = 0
        self._work.model_lock.reserve()
        try:
            self._flight = self._bridge.start(self._synchronizer.synchronize(self._work))
            self._flight.add_done_callback(lambda _: self._work.model_lock.end_reservation())
            self._work.model_lock.acquire(self._bridge.is_over)
        except BaseException:
            self._work.model_lock.end_reservation()
            raise

    def _look_after_flight(self) -> None:
        """Lend the model to a round under compute; wait for its result once it is due."""
        if self._flight is None:
            return
        self._work.model_lock.release()
        if self._flight.done() or self._work.steps >= self._overlap_steps:
            self._synchronize_when_enough()
        else:
            self._work.model_lock.acquire(self._bridge.is_over)

    def _rest(self, result: RoundResult) -> bool:
        self._bridge.rest(PAUSE_SECONDS)
        return True

    def _is_due(self, batch_samples: int, batch_seconds: float) -> bool:
        if self._every > 1:
            self._bridge.tell(self._synchronizer.note_steps, self.steps_in_round, batch_seconds)
            return self._synchronizer.is_due(self.steps_in_round)
        if self._synchronizer.is_closing():
            return True
        return self._bridge.wait(self._synchronizer.report(self._work.samples, batch_samples, batch_seconds))

    def synchronize(self) -> RoundResult:
        """Contribute the pending work now, or finish a round under compute; return the result.

        Raises:
            TemporaryError: The swarm was closed, or its network ended.
            UsageError: Parameters were frozen or unfrozen since this optimizer was made.
        """
        self._check_layout()
        self._work.model_lock.release()
        flight, self._flight = self._flight, None
        if flight is not None:
            self.last_result = self._bridge.finish(flight)
        else:
            if self._overlap_steps:
                self._work.steps = 0
            self.last_result = self._bridge.wait(self._synchronizer.synchronize(self._work))
        steps = 0 if self._overlap_steps else self._work.steps
        if self.last_result.committed or self._work.steps == 0:
            self._first_step = steps
        else:  # Retry after a part of a round's steps.
            self._first_step = self._work.steps + max(1, self._steps_per_round // 4) - self._steps_per_round
        if self._every > 1:
            self._bridge.tell(self._synchronizer.note_steps, self.steps_in_round)
        return self.last_result

    def _check_layout(self) -> None:
        entries = self._synchronizer.state.layout.parameter_entries
        check_layout_is_kept(self._module, (entry.name for entry in entries))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the live gradients, but not those accumulated for the global batch."""
        self.inner.zero_grad(set_to_none)

    def load_inner_state(self, state: dict[Any, Any]) -> None:
        """Load the ``state`` of the wrapped optimizer's `state_dict`; its hyperparameters stay as they are."""
        self.load_state_dict({**self.inner.state_dict(), "state": state})

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, and the counts and gradients not contributed yet."""
        own = {"pending": list(self._work.pending), "samples": self._work.samples, "steps": self._work.steps}
        values: dict[str, Any] = dict(self.inner.state_dict())
        values["p2ptrain"] = {**own, "accumulated": self._work.accumulated}
        return values

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the output of `state_dict`, or a plain state of the wrapped optimizer."""
        values = dict(state_dict)
        own = values.pop("p2ptrain", None)
        self.inner.load_state_dict(values)
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state
        self._rates.change()  # Loaded rates do not count as a change by other code.
        if own is not None:
            self._work.pending, self._work.samples, self._work.steps = own["pending"], own["samples"], own["steps"]
            if self._work.accumulated is not None and own["accumulated"] is not None:
                self._work.accumulated.copy_(own["accumulated"])
