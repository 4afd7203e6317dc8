"""The live model's side of a synchronisation: the pending local work, and the update of the live values.

A step adds its tokens to the pending ones of each of the P fragments. A contribution to a fragment weighs 1 / P of its
pending tokens. So a token counts once after all fragments' turns, and a fragment that missed its turn weighs more in
the next.

With overlap (``training.overlap_steps``) training continues while a contribution is averaged. After the result the
live values become ``mixing * live + (1 - mixing) * shared`` (Streaming DiLoCo, arXiv 2501.18512, algorithm 2). Work
since the contribution was read stays pending.
"""

from __future__ import annotations

import copy
import logging
from contextlib import AbstractAsyncContextManager
from typing import Any

import torch

from p2ptrain.training.gradients import is_sparse
from p2ptrain.training.model_lock import Rest
from p2ptrain.training.state.layout import Fragment
from p2ptrain.training.state.shared_state import SharedState

logger = logging.getLogger(__name__)


class LocalWork:
    """The local work since the last contribution; implements `p2ptrain.training.sync.contribution.Contribution`.

    It contributes gradients if ``accumulate`` (``every = 1``), else pseudo-gradients. ``mixing`` is None without
    overlap. ``inner``, the optimizer of local steps, is None if its state is shared.

    Attributes:
        pending: By fragment: tokens of work not contributed yet.
        samples: Samples read since the last contribution.
        steps: Local batches since the last contribution; with overlap, since the last one was read.
        rest: The lock between the training thread and the synchronising side.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        state: SharedState,
        accumulate: bool,
        mixing: float | None = None,
        inner: torch.optim.Optimizer | None = None,
    ) -> None:
        self.module = module
        self.state = state
        self.pending = [0] * len(state.fragments)
        self.samples = 0
        self.steps = 0
        self.rest = Rest()
        self._mixing = mixing
        self._inner = inner
        # Kept for optimizers that have state before their first step, and cannot recreate it.
        self._first_state = {key: copy.deepcopy(value) for key, value in inner.state.items()} if inner else {}
        size = state.layout.num_parameters
        self.accumulated = torch.zeros(size, dtype=torch.float32) if accumulate else None

    @property
    def tokens(self) -> int:
        return sum(self.pending) // len(self.pending)

    def tokens_of(self, fragment: Fragment) -> int:
        return self.pending[fragment.index] // len(self.pending)

    def at_rest(self) -> AbstractAsyncContextManager[None]:
        return self.rest.held()

    def add_step(self, samples: int, tokens: int) -> None:
        self.samples += samples
        self.steps += 1
        self.pending = [pending + tokens for pending in self.pending]

    def add_gradients(self, tokens: int) -> None:
        """Add the live gradients, which are finite, weighted by tokens."""
        assert self.accumulated is not None
        for entry, parameter in self.state.layout.parameters_of(self.module):
            if parameter.grad is not None:
                part = self.accumulated[entry.offset : entry.offset + parameter.numel()]
                gradient = parameter.grad.detach()
                gradient = gradient.to_dense() if is_sparse(gradient) else gradient
                part.add_(gradient.to("cpu", torch.float32).reshape(-1).mul(float(tokens)))

    def collect(self, out: torch.Tensor, fragment: Fragment | None = None) -> None:
        """Write shared minus live values; with accumulated gradients, their weighted mean in the parameters' part."""
        fragment = fragment or self.state.layout.whole
        fragment.layout.read(self.module, out)
        torch.sub(self._shared(fragment), out, out=out)
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

    def begin_anew(self) -> None:
        self.adopt(False, None)
        if self._inner is not None:
            self._inner.state.clear()
            self._inner.state.update({key: copy.deepcopy(value) for key, value in self._first_state.items()})

    def mend_buffers(self) -> None:
        """Restore the live buffers from the shared state if a bad batch left a value that is not finite."""
        if not all(bool(buffer.isfinite().all()) for buffer in self.module.buffers()):
            self.state.layout.write(self.state.vector, self.module, kind="buffer")

    def to_save(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the counts and tensors of the pending work; empty if there is none."""
        if not any(self.pending) and not self._mixing:
            return {}, {}
        live = self.state.layout.new_vector()
        self.state.layout.read(self.module, live)
        tensors = {"live": live} | ({} if self.accumulated is None else {"accumulated": self.accumulated})
        return {"pending": list(self.pending), "samples": self.samples, "steps": self.steps}, tensors

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
