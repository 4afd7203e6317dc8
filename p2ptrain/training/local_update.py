"""The live model's side of a synchronisation: what a peer did, and how it takes on what the swarm made of it.

What is contributed is counted by fragment: a step adds its tokens to every fragment's pending ones, and a contribution
to a fragment is worth 1 / P of them (P: how many fragments there are). So a token counts once when all have had their
turn, and a fragment that missed its turn weighs as much more in the next.

With overlap (``training.overlap_steps``) training goes on while a contribution is under way. When the result has been
applied to the shared state, the live values become ``mixing * live + (1 - mixing) * shared`` (Streaming DiLoCo, arXiv
2501.18512, algorithm 2); what was done since the contribution was read is still to be contributed.
"""

from __future__ import annotations

import copy
import logging
from contextlib import AbstractAsyncContextManager
from typing import Any

import torch

from p2ptrain.training.gradients import is_sparse
from p2ptrain.training.model_lock import Rest
from p2ptrain.training.state.fragments import Fragment
from p2ptrain.training.state.shared_state import SharedState

logger = logging.getLogger(__name__)


class LocalWork:
    """Implements `p2ptrain.training.sync.contribution.Contribution`.

    Attributes:
        pending: By fragment: tokens whose work on it is not contributed yet.
        samples: Samples read since the last contribution.
        steps: Local batches since the last contribution; with overlap, since the last one was read.
        rest: Keeps the training thread and the synchronising side apart.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        state: SharedState,
        accumulate: bool,
        mixing: float | None = None,
        inner: torch.optim.Optimizer | None = None,
    ) -> None:
        """
        Args:
            module: The live model.
            state: What it shares with the swarm.
            accumulate: Whether gradients are contributed (``every = 1``) rather than pseudo-gradients.
            mixing: With overlap: how much of the live values stays when a result is applied; None without overlap.
            inner: The optimizer of local steps, whose state is this peer's own; None if there is none.
        """
        self.module = module
        self.state = state
        self.pending = [0] * len(state.fragments)
        self.samples = 0
        self.steps = 0
        self.rest = Rest()
        self._mixing = mixing
        self._inner = inner
        # Most optimizers have no state before their first step; some could not make it again.
        self._first_state = {key: copy.deepcopy(value) for key, value in inner.state.items()} if inner else {}
        size = state.layout.num_parameters
        self.accumulated = torch.zeros(size, dtype=torch.float32) if accumulate else None

    @property
    def tokens(self) -> int:
        """See `Contribution.tokens`."""
        return sum(self.pending) // len(self.pending)

    def tokens_of(self, fragment: Fragment) -> int:
        """See `Contribution.tokens_of`."""
        return self.pending[fragment.index] // len(self.pending)

    def at_rest(self) -> AbstractAsyncContextManager[None]:
        """See `Contribution.at_rest`."""
        return self.rest.held()

    def add_step(self, samples: int, tokens: int) -> None:
        """Count one local batch."""
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
        """Start minus now; for accumulated gradients, their token-weighted mean (and start minus now for buffers)."""
        fragment = fragment or self.state.fragments.whole
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
        """See `Contribution.adopt`."""
        affected = range(len(self.pending)) if fragment is None else [fragment.index]
        fragment = fragment or self.state.fragments.whole
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
            self.steps = 0  # A carried fragment's turn comes again when its turn comes.

    def begin_anew(self) -> None:
        """See `Contribution.begin_anew`."""
        self.adopt(False, None)
        if self._inner is not None:
            self._inner.state.clear()
            self._inner.state.update({key: copy.deepcopy(value) for key, value in self._first_state.items()})

    def mend_buffers(self) -> None:
        """Set the live buffers from the shared state if a value of theirs is not finite, as a bad batch leaves them."""
        if not all(bool(buffer.isfinite().all()) for buffer in self.module.buffers()):
            self.state.layout.write(self.state.vector, self.module, kind="buffer")

    def to_save(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the counts and tensors of the work that waits; empty if nothing waits."""
        if not any(self.pending) and not self._mixing:
            return {}, {}
        live = self.state.layout.new_vector()
        self.state.layout.read(self.module, live)
        tensors = {"live": live} | ({} if self.accumulated is None else {"accumulated": self.accumulated})
        return {"pending": list(self.pending), "samples": self.samples, "steps": self.steps}, tensors

    def restore(self, counts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bool:
        """Take up what `to_save` gave, at the same shared state; False, and nothing changed, if it does not fit."""
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
        """The live values, moved towards the shared ones."""
        assert self._mixing is not None
        live = torch.empty(fragment.num_values, dtype=torch.float32)
        fragment.layout.read(self.module, live)
        return live.sub_(shared).mul_(self._mixing).add_(shared)

    def _shared(self, fragment: Fragment) -> torch.Tensor:
        """The shared state's values of a fragment; not to be changed."""
        if fragment.num_values == self.state.layout.num_values:
            return self.state.vector
        values = torch.empty(fragment.num_values, dtype=torch.float32)
        fragment.gather(self.state.vector, values)
        return values
