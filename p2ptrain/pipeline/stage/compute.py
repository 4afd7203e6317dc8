"""A stage's arithmetic: forward, and backward with recomputation.

Forward keeps no graph; backward recomputes it from the input (Chen et al., *Training deep nets with sublinear memory
cost*, 2016). So a microbatch in flight costs only its input. A repeated pass gives the same gradients while the
parameters stay.

All passes run on the device's thread.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass

import torch
from torch.nn import functional

from p2ptrain.models.stage import WHOLE, Stage, StageContext
from p2ptrain.pipeline.messages import BadMicrobatchError

MAX_GRADIENT = 1e6
"""Bound on a microbatch's mean gradient: as `AveragingSpec.max_value`, above which a host's whole contribution is
refused. A larger value would also round off earlier terms of the sum for good."""


@dataclass(frozen=True)
class Gradients:
    """Results of a backward pass.

    Attributes:
        parameters: Gradients of the trained parameters, in the stage's order, on its device; None where unused.
        inputs: Gradient with respect to the stage's input, fp32 on the CPU; None in the first stage.
        loss: Mean over the targets in nats, if the pass computed it.
    """

    parameters: tuple[torch.Tensor | None, ...]
    inputs: torch.Tensor | None
    loss: float = 0.0


class StageCompute:
    """Computes the passes of a stage in training mode, on its device; ``parameters`` are the trained ones.

    Each raises `BadMicrobatchError` if output or loss is not finite, or a gradient is not, or exceeds `MAX_GRADIENT`.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.parameters = tuple(parameter for parameter in stage.parameters() if parameter.requires_grad)
        self._device = next(itertools.chain(stage.parameters(), stage.buffers())).device

    def forward(self, inputs: torch.Tensor, context: StageContext = WHOLE) -> torch.Tensor:
        """Return the stage's output in fp32 on the CPU, for inputs on the CPU; see `p2ptrain.models.stage`."""
        with torch.no_grad(), self._precision():
            output = self.stage(inputs.to(self._device), context)
        return self._checked(output.float().cpu(), "the stage's output")

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """Return the last stage's loss in nats, without backward."""
        with torch.no_grad(), self._precision():
            logits = self.stage(inputs.to(self._device))
        return float(self._checked(self._cross_entropy(logits, targets), "the loss"))

    def backward(self, inputs: torch.Tensor, gradient: torch.Tensor) -> Gradients:
        """Return a microbatch's gradients, given that of the loss with respect to the output (fp32, of its shape)."""
        entry = self._entry(inputs)
        with torch.enable_grad(), self._precision():
            output = self.stage(entry)
        return self._gradients(output, gradient.to(self._device, output.dtype), entry, 0.0)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> Gradients:
        """Return the last stage's loss and gradients.

        ``targets`` are class indices, int64, of the output's shape without its last dimension.
        """
        entry = self._entry(inputs)
        with torch.enable_grad():
            with self._precision():
                logits = self.stage(entry)
            loss = self._cross_entropy(logits, targets)
        self._checked(loss.detach(), "the loss")
        return self._gradients(loss, torch.ones_like(loss), entry, float(loss.detach()))

    def _cross_entropy(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.float().flatten(0, -2), targets.to(self._device).flatten())

    def _entry(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the input as a leaf, which requires a gradient except in the first stage."""
        entry = inputs.to(self._device).detach()
        return entry if self.stage.is_first else entry.requires_grad_()

    def _gradients(self, output: torch.Tensor, gradient: torch.Tensor, entry: torch.Tensor, loss: float) -> Gradients:
        wanted = [*self.parameters, *([] if self.stage.is_first else [entry])]
        if not wanted:  # a first stage without adapters
            return Gradients((), None, loss)
        found = torch.autograd.grad(output, wanted, gradient, allow_unused=True)
        for each in found:
            if each is not None and not float(each.abs().amax()) <= MAX_GRADIENT:
                raise BadMicrobatchError(f"a gradient is not finite, or too large: more than {MAX_GRADIENT:g}")
        back = None if self.stage.is_first else found[-1]
        return Gradients(found[: len(self.parameters)], None if back is None else back.float().cpu(), loss)

    def _checked(self, value: torch.Tensor, what: str) -> torch.Tensor:
        if not bool(torch.isfinite(value).all()):
            raise BadMicrobatchError(f"{what} is not finite")
        return value

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        if self._device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return contextlib.nullcontext()
