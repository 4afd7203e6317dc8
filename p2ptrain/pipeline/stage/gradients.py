"""The sum of a stage's gradients, to which microbatches are added, and from which they can be removed.

A repeated pass gives the same gradients while the parameters stay, and gradients are rounded before they are added. So
adding them with negated weight removes a microbatch, up to the rounding of the sum.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from p2ptrain.errors import P2PTrainError
from p2ptrain.pipeline.messages import Hop, Payload, pack, unpack
from p2ptrain.pipeline.stage.compute import Gradients
from p2ptrain.pipeline.stage.device import Pass, Timed
from p2ptrain.pipeline.stage.worker import StageWorker
from p2ptrain.tasks import Tasks


class GradientSum:
    """A sum of gradients times tokens, fp32 on the CPU; ``places`` has each parameter's slice by its ``id``."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.places: dict[int, slice] = {}
        offset = 0
        for parameter in parameters:
            self.places[id(parameter)] = slice(offset, offset + parameter.numel())
            offset += parameter.numel()
        self.values = torch.zeros(offset, dtype=torch.float32)

    def add(self, gradients: Sequence[torch.Tensor | None], weight: float) -> None:
        """Add ``weight`` times the gradients of all parameters."""
        for place, each in zip(self.places.values(), gradients, strict=True):
            if each is not None:  # Rounded before it is added, to cancel exactly.
                self.values[place].add_(each.float().cpu().reshape(-1).mul(weight))


@dataclass
class Added:
    """Record for the removal of a microbatch from the sum.

    Attributes:
        back: Gradient of the stage's output; if ``is_loss``, the targets.
        is_in: True while it is in the sum; used on the device alone.
    """

    inputs: Payload
    back: Payload
    tokens: int
    is_loss: bool
    is_in: bool = False


@dataclass(frozen=True)
class Backward:
    """Results of a pass that added to the sum.

    Attributes:
        loss: On the last stage: mean over the targets, in nats.
        gradient: With respect to the stage's inputs; None in the first stage.
    """

    loss: float
    gradient: Payload | None
    added: Added


class StageGradients:
    """Adds microbatches to a stage's sum, and removes them; ``undoing`` are the pending removals."""

    def __init__(self, worker: StageWorker, total: GradientSum | None = None) -> None:
        self.total = total or GradientSum(worker.compute.parameters)
        self.worker = worker
        self._failures: list[Exception] = []
        self.undoing = Tasks(self._failures.append)

    async def add(self, hop: Hop, back: Payload) -> Timed[Backward]:
        """Run a microbatch's backward pass and add it to the sum; cancellation removes it again.

        Args:
            back: Gradient of the stage's output; where the loss is computed, the targets.

        Raises:
            BadMicrobatchError: Loss or gradients are not finite, or too large for the codec; nothing is added.
        """
        added = Added(hop.inputs, back, hop.tokens, self.worker.ends(hop))

        def run() -> Backward:
            found = self._pass(added)
            gradient = None if found.inputs is None else pack(found.inputs, self.worker.codec)
            self.total.add(found.parameters, float(added.tokens))
            added.is_in = True
            return Backward(found.loss, gradient, added)

        try:
            return await self.worker.run(Pass.BACKWARD, run)
        except asyncio.CancelledError:  # If the pass has begun, it runs to its end.
            self.take_out(added)
            raise

    def _pass(self, added: Added) -> Gradients:
        compute, inputs, back = self.worker.compute, unpack(added.inputs), unpack(added.back)
        return compute.loss(inputs, back) if added.is_loss else compute.backward(inputs, back)

    def take_out(self, added: Added) -> None:
        """Start to remove a microbatch, if it is in the sum; see `until_taken_out`."""

        def undo() -> None:
            if added.is_in:
                self.total.add(self._pass(added).parameters, -float(added.tokens))
                added.is_in = False

        self.undoing.start(self.worker.run(Pass.UNDO, undo), "undo")

    async def until_taken_out(self) -> None:
        """Wait until all removals are complete.

        Raises:
            P2PTrainError: A removal failed: the sum still has a microbatch that does not count.
        """
        await self.undoing.join()
        if self._failures:
            raise P2PTrainError(
                f"a microbatch that was given up is still in this stage's gradients ({self._failures[0]!r}): start"
                " this peer again"
            ) from self._failures[0]
