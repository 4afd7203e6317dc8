"""The sum of a stage's gradients: what counted microbatches add to it, and what takes one out of it again.

The same pass gives the same gradients again as long as the parameters stay, and they are rounded before they are added.
Adding them with the negated weight takes a microbatch out, up to the rounding of the sum.
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

CLOSE_SECONDS = 2.0
"""Timeout of a host that leaves, for its device to take out what was given up."""


class GradientSum:
    """A sum of gradients times tokens.

    Args:
        parameters: What is trained, in the stage's order.

    Attributes:
        values: fp32 on the CPU, ``[num_values]``.
        places: Where each parameter's gradient is, by its identity.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.places: dict[int, slice] = {}
        offset = 0
        for parameter in parameters:
            self.places[id(parameter)] = slice(offset, offset + parameter.numel())
            offset += parameter.numel()
        self.values = torch.zeros(offset)

    def add(self, gradients: Sequence[torch.Tensor | None], weight: float) -> None:
        """Add gradients of all parameters ``weight`` times."""
        for place, each in zip(self.places.values(), gradients, strict=True):
            if each is not None:  # Rounded before it is added, to cancel exactly.
                self.values[place].add_(each.float().cpu().reshape(-1).mul(weight))


@dataclass
class Added:
    """The record by which a microbatch is taken out of the sum again.

    Attributes:
        inputs: Of the stage.
        back: What came back; on the last stage, the targets.
        tokens: Its weight.
        is_loss: Whether what came back are targets.
        is_in: Whether it is in the sum; known on the device alone, between passes.
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
        gradient: In the stage's inputs; None in the first stage.
        added: What takes it out again.
    """

    loss: float
    gradient: Payload | None
    added: Added


class StageGradients:
    """Adds microbatches to a stage's sum, and takes them out.

    Args:
        worker: Runs the passes.
        total: The sum, if it is another than `GradientSum`.
    """

    def __init__(self, worker: StageWorker, total: GradientSum | None = None) -> None:
        self.total = total or GradientSum(worker.compute.parameters)
        self.worker = worker
        self._undoing = Tasks(self._not_taken_out)
        self._failure: Exception | None = None

    async def add(self, hop: Hop, back: Payload) -> Timed[Backward]:
        """Run a microbatch's backward pass, and add it to the sum; if it is cancelled, it is taken out again.

        Args:
            hop: Which.
            back: The gradient in the stage's output; where the loss is made, the targets.

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
        """Take a microbatch out of the sum again, if it is in it; that may take until `until_taken_out` returns."""

        def undo() -> None:
            if added.is_in:
                self.total.add(self._pass(added).parameters, -float(added.tokens))
                added.is_in = False

        self._undoing.start(self.worker.run(Pass.UNDO, undo), "undo")

    async def until_taken_out(self) -> None:
        """Return when nothing is being taken out any more.

        Raises:
            P2PTrainError: Something could not be taken out: the sum holds what does not count.
        """
        await self._undoing.join()
        if self._failure is not None:
            raise P2PTrainError(
                f"a microbatch that was given up is still in this stage's gradients ({self._failure!r}): start this"
                " peer again"
            ) from self._failure

    def _not_taken_out(self, error: Exception) -> None:
        self._failure = error

    async def close(self) -> None:
        """Wait for what is being taken out, unless the device is stuck."""
        await self._undoing.close(CLOSE_SECONDS)
