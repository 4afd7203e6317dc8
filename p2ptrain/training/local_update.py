"""The live model's side of a synchronisation: the pending local work, its contribution, and the model's lock.

A step adds its tokens to the pending ones of each of the P fragments. A contribution to a fragment weighs 1 / P of its
pending tokens. So a token counts once after all fragments' turns, and a fragment that missed its turn weighs more in
the next.

With overlap (``training.overlap_steps``) training continues while a contribution is averaged. After the result the
live values become ``mixing * live + (1 - mixing) * shared`` (Streaming DiLoCo, arXiv 2501.18512, algorithm 2). Work
since the contribution was read stays pending.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch

from p2ptrain.errors import TemporaryError
from p2ptrain.training.gradients import is_sparse
from p2ptrain.training.private.drift import DriftCorrection
from p2ptrain.training.state.layout import Fragment
from p2ptrain.training.state.shared_state import SharedState

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Interval at which a waiting training thread checks whether the event loop's side has ended."""


class LocalContribution:
    """The local work since the last contribution; implements `p2ptrain.training.sync.replica.Contribution`.

    It contributes gradients if ``accumulate`` (``every = 1``), else pseudo-gradients. ``mixing`` is None without
    overlap. ``inner``, the optimizer of local steps, is None if its state is shared.
    ``corrects_drift`` needs one fragment and no overlap.

    Attributes:
        pending: By fragment: tokens of work not contributed yet.
        drift: The correction of local steps; None for none.
        samples: Samples read since the last contribution.
        steps: Local batches since the last contribution; with overlap, since the last one was read.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        state: SharedState,
        accumulate: bool,
        mixing: float | None = None,
        inner: torch.optim.Optimizer | None = None,
        corrects_drift: bool = False,
    ) -> None:
        self.module = module
        self.state = state
        self.pending = [0] * len(state.fragments)
        self.samples = 0
        self.steps = 0
        self.model_lock = ModelLock()
        self._mixing = mixing
        self._inner = inner
        self.drift = DriftCorrection(state.layout) if corrects_drift else None
        # Kept for optimizers that have state before their first step, and cannot recreate it.
        self._first_state = {key: copy.deepcopy(value) for key, value in inner.state.items()} if inner else {}
        self._personal = state.layout.read_personal(module)
        size = state.layout.num_parameters
        self.accumulated = torch.zeros(size, dtype=torch.float32, device="cpu") if accumulate else None

    @property
    def tokens(self) -> int:
        return sum(self.pending) // len(self.pending)

    def tokens_of(self, fragment: Fragment) -> int:
        return self.pending[fragment.index] // len(self.pending)

    def stepped(self, keeps_buffers: bool) -> None:
        """Correct drift after a step of the inner optimizer; with ``keeps_buffers``, set the live buffers back.

        Buffers that layers change would tell of samples under differential privacy.
        """
        if keeps_buffers:
            self.state.layout.write(self.state.vector, self.module, kind="buffer")
        if self.drift is not None:
            self.drift.correct(self.module)

    def add_step(self, samples: int, tokens: int) -> None:
        self.samples += samples
        self.steps += 1
        self.pending = [pending + tokens for pending in self.pending]

    def add_gradients(self, trained: Iterable[torch.Tensor], tokens: int) -> None:
        """Add the live gradients of the optimizer's parameters, which are finite, weighted by tokens."""
        assert self.accumulated is not None
        held = set(map(id, trained))
        for entry, parameter in self.state.layout.parameters_of(self.module):
            if parameter.grad is not None and id(parameter) in held:
                part = self.accumulated[entry.offset : entry.offset + parameter.numel()]
                gradient = parameter.grad.detach()
                gradient = gradient.to_dense() if is_sparse(gradient) else gradient
                part.add_(gradient.to("cpu", torch.float32).reshape(-1).mul(float(tokens)))

    def collect(self, out: torch.Tensor, fragment: Fragment | None = None) -> None:
        """Write shared minus live values; with accumulated gradients, their weighted mean in the parameters' part."""
        fragment = fragment or self.state.layout.whole
        fragment.layout.read(self.module, out)
        torch.sub(self._shared(fragment), out, out=out)
        if self.drift is not None:
            self.drift.add_to(out)
        if self.accumulated is not None:
            torch.div(self.accumulated, float(max(self.tokens, 1)), out=out[: fragment.layout.num_parameters])

    def adopt(
        self,
        contributed: bool,
        carry: torch.Tensor | None,
        fragment: Fragment | None = None,
        counted: tuple[int, int] = (0, 0),
    ) -> None:
        affected = range(len(self.pending)) if fragment is None else [fragment.index]
        fragment = fragment or self.state.layout.whole
        target = self._shared(fragment)
        if contributed and self._mixing:
            target = self._mixed(target, fragment)
        elif carry is not None and self.accumulated is None:
            target = target - carry
        if self.drift is not None and contributed:
            live = self.state.layout.new_vector()
            self.state.layout.read(self.module, live)
            self.drift.learn(target, live, self.steps)
        elif self.drift is not None:
            self.drift.count = 0  # A carry is without corrections.
        fragment.layout.write(target, self.module)
        if carry is not None and self.accumulated is not None and not contributed:
            torch.mul(carry[: len(self.accumulated)], float(max(self.tokens, 1)), out=self.accumulated)
        if contributed and self._mixing is not None:
            tokens, samples = counted
            left = max(0, self.pending[fragment.index] - len(self.pending) * tokens)
            self.pending[fragment.index] = left if self._mixing else 0
            self.samples = max(0, self.samples - samples)
        elif contributed or carry is None:
            for index in affected:
                self.pending[index] = 0
            if contributed or not any(self.pending):
                self.samples = 0
            if self.accumulated is not None:
                self.accumulated.zero_()
        if self._mixing is None and (contributed or carry is None or len(self.pending) > 1):
            self.steps = 0  # A carried fragment waits for its next turn.
        personal = self.state.layout.read_personal(self.module)
        if all(bool(tensor.isfinite().all()) for tensor in personal.values()):
            self._personal = personal

    def reset(self) -> None:
        self.state.layout.write_personal(self._personal, self.module)
        self.adopt(False, None)
        if self.drift is not None:
            self.drift.step.zero_()
        if self._inner is not None:
            self._inner.state.clear()
            self._inner.state.update({key: copy.deepcopy(value) for key, value in self._first_state.items()})

    def restore_buffers(self) -> None:
        """Restore the live buffers from the shared state if a bad batch left a value that is not finite.

        Personal tensors then become those of the last round.
        """
        if not all(bool(buffer.isfinite().all()) for buffer in self.module.buffers()):
            self.state.layout.write(self.state.vector, self.module, kind="buffer")
            self.state.layout.write_personal(self._personal, self.module)

    def to_save(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the counts and tensors of the pending work; empty if there is none."""
        if not any(self.pending) and not self._mixing:
            return {}, {}
        live = self.state.layout.new_vector()
        self.state.layout.read(self.module, live)
        tensors = {"live": live} | ({} if self.accumulated is None else {"accumulated": self.accumulated})
        corrections = {} if self.drift is None else {"corrections": self.drift.count}
        return {"pending": list(self.pending), "samples": self.samples, "steps": self.steps, **corrections}, tensors

    def restore(self, counts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bool:
        """Load the output of `to_save` at the same shared state; return False, changing nothing, if it does not fit."""
        live, accumulated = tensors["live"], tensors.get("accumulated")
        fits = live.shape == self.state.vector.shape and len(counts["pending"]) == len(self.pending)
        if self.accumulated is not None:
            fits = fits and accumulated is not None and accumulated.shape == self.accumulated.shape
        if not fits:
            logger.warning("the work in the checkpoint does not fit this model, and is dropped")
            return False
        self.pending, self.samples, self.steps = list(counts["pending"]), counts["samples"], counts["steps"]
        if self.accumulated is not None and accumulated is not None:
            self.accumulated.copy_(accumulated)
        if self.drift is not None:
            self.drift.count = counts.get("corrections", 0)
        self.state.layout.write(live, self.module)
        return True

    def _mixed(self, shared: torch.Tensor, fragment: Fragment) -> torch.Tensor:
        assert self._mixing is not None
        live = torch.empty(fragment.num_values, dtype=torch.float32)
        fragment.layout.read(self.module, live)
        return live.sub_(shared).mul_(self._mixing).add_(shared)

    def _shared(self, fragment: Fragment) -> torch.Tensor:
        """Return the shared state's values of a fragment; the caller must not change them."""
        if fragment.num_values == self.state.layout.num_values:
            return self.state.vector
        values = torch.empty(fragment.num_values, dtype=torch.float32)
        fragment.gather(self.state.vector, values)
        return values


class ModelLock:
    """The lock on the live model, between the training thread and the event loop's side of a round.

    When a round runs under compute (``training.overlap_steps``), the event loop's side needs the model twice: to read
    the contribution, and to apply the result. It waits in ``async with lock``, and the training thread grants the lock
    at the end of a step. Without overlap the training thread waits for the whole round, so the lock is free.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._training = False
        self._reserved = False
        self._held = False
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    # --- the training thread's side

    def release(self) -> None:
        """Release the model, and grant it to the waiting side."""
        with self._changed:
            self._training = False
            if self._waiting is not None:
                (loop, future), self._waiting = self._waiting, None
                self._held = True
                loop.call_soon_threadsafe(_grant, future)

    def acquire(self, is_over: Callable[[], bool]) -> None:
        """Take the model; wait while it is held or reserved.

        Raises:
            TemporaryError: The event loop's side has ended (``is_over``) without releasing it.
        """
        with self._changed:
            while self._held or self._reserved:
                if not self._changed.wait(POLL_SECONDS) and is_over():
                    raise TemporaryError("the swarm was closed during a round: call Swarm.join again to go on")
            self._training = True

    def reserve(self) -> None:
        """Keep the model for the event loop's side, whose task has not come yet; call after `release`."""
        with self._changed:
            self._reserved = True

    def end_reservation(self) -> None:
        """Cancel `reserve` if the task did not come; safe from any thread."""
        with self._changed:
            self._reserved = False
            self._changed.notify_all()

    # --- the event loop's side

    async def __aenter__(self) -> None:
        with self._changed:
            if not self._training:
                self._reserved, self._held = False, True
                return
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            self._waiting = (loop, future)
        try:
            await future
        except asyncio.CancelledError:
            with self._changed:
                granted = self._waiting is None
                self._waiting = None
            if granted:
                self._give_back()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._give_back()

    def _give_back(self) -> None:
        with self._changed:
            self._held = False
            self._changed.notify_all()


def _grant(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
