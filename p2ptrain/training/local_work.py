"""The live model's side of a synchronisation: what a peer did, and how it takes on what the swarm made of it.

What is contributed is counted by fragment: a step adds its tokens to every fragment's pending ones, and a contribution
to a fragment is worth 1 / P of them (P: how many fragments there are). So a token counts once when all have had their
turn, and a fragment that missed its turn weighs as much more in the next.

With overlap (``training.overlap_steps``) training goes on while a contribution is under way. When the result has been
applied to the shared state, the live values become ``mixing * live + (1 - mixing) * shared`` (Streaming DiLoCo, arXiv
2501.18512, algorithm 2); what was done since the contribution was read is still to be contributed.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import torch

from p2ptrain.training.fragments import Fragment
from p2ptrain.training.rest import Rest
from p2ptrain.training.state import SharedState


class LocalWork:
    """Implements `p2ptrain.training.work.Work`.

    Attributes:
        pending: By fragment: tokens whose work on it is not contributed yet.
        samples: Samples read since the last contribution.
        steps: Local batches since the last contribution; with overlap, since the last one was read.
        rest: Keeps the training thread and the synchronising side apart.
    """

    def __init__(
        self, module: torch.nn.Module, state: SharedState, accumulate: bool, mixing: float | None = None
    ) -> None:
        """
        Args:
            module: The live model.
            state: What it shares with the swarm.
            accumulate: Whether gradients are contributed (``every = 1``) rather than pseudo-gradients.
            mixing: With overlap: how much of the live values stays when a result is applied; None without overlap.
        """
        self.module = module
        self.state = state
        self.pending = [0] * len(state.fragments)
        self.samples = 0
        self.steps = 0
        self.rest = Rest()
        self._mixing = mixing
        size = state.layout.num_parameters
        self.accumulated = torch.zeros(size, dtype=torch.float32) if accumulate else None

    @property
    def tokens(self) -> int:
        """See `Work.tokens`."""
        return sum(self.pending) // len(self.pending)

    def tokens_of(self, fragment: Fragment) -> int:
        """See `Work.tokens_of`."""
        return self.pending[fragment.index] // len(self.pending)

    def at_rest(self) -> AbstractAsyncContextManager[None]:
        """See `Work.at_rest`."""
        return self.rest.held()

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

    def adopt(
        self,
        contributed: bool,
        carry: torch.Tensor | None,
        fragment: Fragment | None = None,
        counted: tuple[int, int] = (0, 0),
    ) -> None:
        """See `Work.adopt`."""
        affected = range(len(self.pending)) if fragment is None else [fragment.index]
        fragment = fragment or self.state.fragments.whole
        target = self._shared(fragment)
        if contributed and self._mixing:
            target = self._mixed(target, fragment)
        elif carry is not None and self.accumulated is None:
            target = target - carry
        fragment.layout.write(target, self.module)
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
