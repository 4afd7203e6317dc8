"""`SwarmOptimizer`: an ordinary ``torch.optim.Optimizer`` whose steps are shared with the swarm.

With ``every = H`` each `SwarmOptimizer.step` is an inner step; after H of them, or when the swarm closes the round, the
pseudo-gradient (start of the round minus now) is averaged and the outer step applied (DiLoCo, arXiv 2311.08105). With P
fragments this happens every H / P steps, to one fragment at a time (Streaming DiLoCo, arXiv 2501.18512).
With ``every = 1`` each call adds one local batch's gradient to an accumulator that ``zero_grad`` does not touch; when
the swarm's global batch is full, the mean gradient is averaged and the wrapped optimizer steps once, the same
everywhere.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

import torch

from p2ptrain.errors import TemporaryError
from p2ptrain.manifest import TrainingSpec
from p2ptrain.training.fragments import Fragment
from p2ptrain.training.state import SharedState
from p2ptrain.training.sync import RoundResult, Synchronizer

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 1.0
"""Between two attempts of a swarm that is below its minimum of peers."""

T = TypeVar("T")


class Bridge:
    """Runs a coroutine on the network's event loop and waits for it from the training thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._current: Future[Any] | None = None
        self._over = ""
        self._ended = threading.Event()

    def cancel(self, reason: str = "the swarm is closing") -> None:
        """End the wait in progress and refuse further ones, from any thread; ``reason`` is what they raise."""
        self._over = self._over or reason
        self._ended.set()
        if self._current is not None:
            self._current.cancel()

    def rest(self, seconds: float) -> None:
        """Let the calling thread wait, but not beyond `cancel`."""
        self._ended.wait(seconds)

    def _is_over(self) -> bool:
        return bool(self._over)

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result; an interrupt of the waiting thread cancels it.

        Raises:
            TemporaryError: The network was closed meanwhile.
        """
        if self._loop.is_closed() or self._over:
            coroutine.close()
            raise TemporaryError(f"{self._over or 'the swarm is closed'}: call Swarm.join again to go on")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._current = future
        if self._is_over():  # It was cancelled just before there was something to cancel.
            future.cancel()
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


class LocalWork:
    """The live model's side of a synchronisation; implements `p2ptrain.training.sync.Work`."""

    def __init__(self, module: torch.nn.Module, state: SharedState, accumulate: bool) -> None:
        self.module = module
        self.state = state
        self.pending = [0] * len(state.fragments)
        """By fragment: tokens whose work on it is not contributed yet."""
        self.samples = 0
        self.steps = 0
        size = state.layout.num_parameters
        self.accumulated = torch.zeros(size, dtype=torch.float32) if accumulate else None

    @property
    def tokens(self) -> int:
        """See `Work.tokens`."""
        return sum(self.pending) // len(self.pending)

    def tokens_of(self, fragment: Fragment) -> int:
        """See `Work.tokens_of`."""
        return self.pending[fragment.index] // len(self.pending)

    def add_step(self, samples: int, tokens: int) -> None:
        """Count one local batch."""
        self.samples += samples
        self.steps += 1
        self.pending = [pending + tokens for pending in self.pending]

    def add_gradients(self, tokens: int) -> None:
        """Add the live gradients, weighted by tokens; refused as a whole when they are not finite."""
        assert self.accumulated is not None
        for entry, parameter in self.state.layout.parameters_of(self.module):
            if parameter.grad is not None:
                part = self.accumulated[entry.offset : entry.offset + parameter.numel()]
                part.add_(parameter.grad.detach().to("cpu", torch.float32).reshape(-1).mul(float(tokens)))

    def collect(self, out: torch.Tensor, fragment: Fragment | None = None) -> None:
        """Start minus now; for accumulated gradients, their token-weighted mean (and start minus now for buffers)."""
        fragment = fragment or self.state.fragments.whole
        fragment.layout.read(self.module, out)
        torch.sub(self._shared(fragment), out, out=out)
        if self.accumulated is not None:
            torch.div(self.accumulated, float(max(self.tokens, 1)), out=out[: fragment.layout.num_parameters])

    def adopt(self, contributed: bool, carry: torch.Tensor | None, fragment: Fragment | None = None) -> None:
        """Set the live model from the shared state; keep, carry or drop the work."""
        whole = fragment is None
        fragment = fragment or self.state.fragments.whole
        target = self._shared(fragment)
        if carry is not None and self.accumulated is None:
            target = target - carry
        fragment.layout.write(target, self.module)
        if contributed or carry is None:
            for index in range(len(self.pending)) if whole else [fragment.index]:
                self.pending[index] = 0
            self.samples = 0
            if self.accumulated is not None:
                self.accumulated.zero_()
        if contributed or carry is None or len(self.pending) > 1:
            self.steps = 0  # A carried fragment's turn comes again when its turn comes.

    def _shared(self, fragment: Fragment) -> torch.Tensor:
        """The shared state's values of a fragment; not to be changed."""
        if fragment.num_values == self.state.layout.num_values:
            return self.state.vector
        values = torch.empty(fragment.num_values, dtype=torch.float32)
        fragment.gather(self.state.vector, values)
        return values


class SwarmOptimizer(torch.optim.Optimizer):
    """Wraps a torch optimizer so that its steps are shared; made by `Swarm.optimizer`.

    Learning-rate schedulers act on the wrapped optimizer's parameter groups, which are shared with this object.

    Attributes:
        inner: The wrapped optimizer.
        last_result: The last synchronisation; None before the first.
        on_pause: Called by `step` with the result of each synchronisation that found the swarm below its minimum of
            peers, where the manifest says that it pauses then. It waits a little, and says whether to go on waiting.
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
    ) -> None:
        """
        Args:
            module: The live model that ``inner`` updates.
            inner: The wrapped optimizer.
            synchronizer: This peer's side of synchronisation; its state belongs to ``module``.
            bridge: To the network's event loop.
            spec: ``every`` and ``local_batch``.
            tokens_per_step: Tokens in one local batch, unless `count` says otherwise.
            clip_norm: Gradient norm limit of every inner step (``every = H``); 0 for none.
                With ``every = 1`` the shared state's stepper clips.
        """
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.state = inner.state
        self.last_result: RoundResult | None = None
        self._module = module
        self._synchronizer = synchronizer
        self._bridge = bridge
        self._every = spec.every
        self._steps_per_round = spec.steps_per_round
        self._clip_norm = clip_norm
        self._work = LocalWork(module, synchronizer.state, accumulate=spec.every == 1)
        self._default_samples = spec.local_batch
        self._default_tokens = tokens_per_step
        self._counted: tuple[int, int] | None = None
        self._next_attempt = spec.steps_per_round
        self._total_tokens = 0
        self._batch_began = time.monotonic()
        self.on_pause: Callable[[RoundResult], bool] = self._rest

    @property
    def round(self) -> int:
        """The round in progress."""
        return self._synchronizer.head.round

    @property
    def committed(self) -> bool:
        """Whether the last synchronisation applied a certified round."""
        return self.last_result is not None and self.last_result.committed

    @property
    def samples_in_round(self) -> int:
        """Samples counted since this peer last contributed."""
        return self._work.samples

    @property
    def tokens_in_round(self) -> int:
        """Tokens counted since this peer last contributed."""
        return self._work.tokens

    @property
    def total_tokens(self) -> int:
        """Tokens counted since this optimizer was made."""
        return self._total_tokens

    def count(self, samples: int, tokens: int) -> None:
        """Say how large the next local batch is, where it differs from the manifest's."""
        if samples < 1 or tokens < 1:
            raise ValueError(f"a batch has at least one sample and token, not {samples} and {tokens}")
        self._counted = (samples, tokens)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Count one local batch; synchronise when the round is due. Returns the closure's loss, if there is one.

        Waits for other peers as long as the swarm is below its minimum, if the manifest says so.

        Raises:
            TemporaryError: The swarm was closed, or its network ended.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        samples, tokens = self._counted or (self._default_samples, self._default_tokens)
        self._counted = None
        if self._every == 1:
            self._work.add_gradients(tokens)
        else:
            if self._clip_norm:
                parameters = [p for group in self.param_groups for p in group["params"]]
                torch.nn.utils.clip_grad_norm_(parameters, self._clip_norm)
            self.inner.step()
        self._work.add_step(samples, tokens)
        self._total_tokens += tokens
        if self._is_due(samples, time.monotonic() - self._batch_began):
            self._synchronize_when_enough()
        self._batch_began = time.monotonic()
        return loss

    def _synchronize_when_enough(self) -> None:
        result = self.synchronize()
        if result.paused:
            logger.warning("round %d: paused: %s", result.round, result.reason)
        while result.paused and self.on_pause(result):
            result = self.synchronize()

    def _rest(self, result: RoundResult) -> bool:
        self._bridge.rest(PAUSE_SECONDS)
        return True

    def _is_due(self, batch_samples: int, batch_seconds: float) -> bool:
        if self._synchronizer.is_closing():
            return True
        if self._every > 1:
            return self._work.steps >= self._next_attempt
        return self._bridge.wait(self._synchronizer.report(self._work.samples, batch_samples, batch_seconds))

    def synchronize(self) -> RoundResult:
        """Contribute what there is to the round in progress now, and wait for its result."""
        self.last_result = self._bridge.wait(self._synchronizer.synchronize(self._work))
        if self.last_result.committed or self._work.steps == 0:
            self._next_attempt = self._steps_per_round
        else:
            self._next_attempt = self._work.steps + max(1, self._steps_per_round // 4)
        return self.last_result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the live gradients; what is accumulated for the global batch stays."""
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and what is not contributed yet."""
        own = {"pending": list(self._work.pending), "samples": self._work.samples, "steps": self._work.steps}
        values: dict[str, Any] = dict(self.inner.state_dict())
        values["p2ptrain"] = {**own, "accumulated": self._work.accumulated}
        return values

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, or a plain state of the wrapped optimizer."""
        values = dict(state_dict)
        own = values.pop("p2ptrain", None)
        self.inner.load_state_dict(values)
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state
        if own is not None:
            self._work.pending, self._work.samples, self._work.steps = own["pending"], own["samples"], own["steps"]
            if self._work.accumulated is not None and own["accumulated"] is not None:
                self._work.accumulated.copy_(own["accumulated"])
