"""A stage's arithmetic: forward, backward, and taking out again what a microbatch put into the sum of gradients.

Forward keeps no graph; backward computes it again from the input (Chen et al., *Training deep nets with sublinear
memory cost*, 2016), so a microbatch in flight costs its input and nothing else. The same pass gives the same gradients
once more as long as the parameters stay: adding those with the negated weight takes a microbatch out again, up to the
rounding of the sum.

Everything here runs on the device's thread.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from dataclasses import dataclass

import torch
from torch.nn import functional

from p2ptrain.models.stage import Stage

MAX_GRADIENT = 1e6
"""The largest value of a microbatch's mean gradient: as `AveragingSpec.max_value`, beyond which a host's contribution
is refused with all else that is in it. Besides, what is that large rounds off what was in the sum before, for good."""


class NotFiniteError(ArithmeticError):
    """A pass gave values that are not finite, or too large; nothing was added to any sum. The message says where."""


@dataclass(frozen=True)
class LossPass:
    """What the last stage gives for a microbatch.

    Attributes:
        loss: Mean over the targets, in nats.
        gradient: Of the loss in the stage's input; None in a stage that is the first one, too.
    """

    loss: float
    gradient: torch.Tensor | None


class StageCompute:
    """A stage and the sum of its gradients.

    Args:
        stage: In training mode, on its device. What is frozen is not in the sum.

    Passes run on the device's thread, and what the round does with parameters and sum on the state's.

    Attributes:
        lock: Held by either while it touches them.
        sum: fp32 on the CPU, ``[num_parameters]``: gradients times tokens of what is trained, in the stage's order.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.lock = threading.Lock()
        self._parameters = [parameter for parameter in stage.parameters() if parameter.requires_grad]
        self._device = next(itertools.chain(stage.parameters(), stage.buffers())).device
        self.sum = torch.zeros(sum(parameter.numel() for parameter in self._parameters))

    def places(self) -> dict[int, slice]:
        """Where in the sum each parameter's gradient is, by its identity."""
        places, offset = dict[int, slice](), 0
        for parameter in self._parameters:
            places[id(parameter)] = slice(offset, offset + parameter.numel())
            offset += parameter.numel()
        return places

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The stage's output in fp32 on the CPU.

        Args:
            inputs: On the CPU; see `p2ptrain.models.stage`.

        Raises:
            NotFiniteError: A value of the output is not finite.
        """
        with self.lock, torch.no_grad(), self._precision():
            output = self.stage(inputs.to(self._device))
        return self._checked(output.float().cpu(), "the stage's output")

    def backward(self, inputs: torch.Tensor, gradient: torch.Tensor, weight: float) -> torch.Tensor | None:
        """Add a microbatch's gradients to the sum, ``weight`` times.

        Args:
            inputs: As in `forward`.
            gradient: Of the loss in the stage's output, fp32 of that shape.
            weight: Its tokens; the negated value takes out what was added before.

        Returns:
            The gradient in the stage's input, whatever the weight; None in the first stage.

        Raises:
            NotFiniteError: A gradient is not finite, or larger than `MAX_GRADIENT`.
        """
        entry = self._entry(inputs)
        with self.lock:
            with torch.enable_grad(), self._precision():
                output = self.stage(entry)
            return self._backward(output, gradient.to(self._device, output.dtype), entry, weight)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor, weight: float) -> LossPass:
        """Forward and backward of the last stage at once.

        Args:
            inputs: As in `forward`.
            targets: Class indices, int64, of the output's shape without its last dimension.
            weight: As in `backward`.

        Raises:
            NotFiniteError: The loss or a gradient is not finite, or a gradient larger than `MAX_GRADIENT`.
        """
        entry = self._entry(inputs)
        with self.lock:
            with torch.enable_grad():
                with self._precision():
                    logits = self.stage(entry)
                loss = functional.cross_entropy(logits.float().flatten(0, -2), targets.to(self._device).flatten())
            self._checked(loss.detach(), "the loss")
            gradient = self._backward(loss, torch.ones_like(loss), entry, weight)
        return LossPass(float(loss.detach()), gradient)

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor) -> float:
        """The last stage's loss alone, in nats.

        Raises:
            NotFiniteError: It is not finite.
        """
        with self.lock, torch.no_grad(), self._precision():
            logits = self.stage(inputs.to(self._device))
        loss = functional.cross_entropy(logits.float().flatten(0, -2), targets.to(self._device).flatten())
        return float(self._checked(loss, "the loss"))

    def _entry(self, inputs: torch.Tensor) -> torch.Tensor:
        """The input as a leaf, of which a gradient is asked if it can have one and somebody wants it."""
        entry = inputs.to(self._device).detach()
        return entry if self.stage.is_first else entry.requires_grad_()

    def _backward(
        self, output: torch.Tensor, gradient: torch.Tensor, entry: torch.Tensor, weight: float
    ) -> torch.Tensor | None:
        wanted = [*self._parameters, *([] if self.stage.is_first else [entry])]
        if not wanted:  # a first stage without adapters
            return None
        found = torch.autograd.grad(output, wanted, gradient, allow_unused=True)
        for each in found:
            if each is not None and not float(each.abs().amax()) <= MAX_GRADIENT:
                raise NotFiniteError(f"a gradient is not finite, or too large: more than {MAX_GRADIENT:g}")
        offset = 0
        for parameter, each in zip(self._parameters, found, strict=False):
            if each is not None:
                part = self.sum[offset : offset + parameter.numel()]
                part.add_(each.float().cpu().reshape(-1).mul(weight))  # Rounded before it is added, to cancel exactly.
            offset += parameter.numel()
        back = None if self.stage.is_first else found[-1]
        return None if back is None else back.float().cpu()

    def _checked(self, value: torch.Tensor, what: str) -> torch.Tensor:
        if not bool(torch.isfinite(value).all()):
            raise NotFiniteError(f"{what} is not finite")
        return value

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        if self._device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return contextlib.nullcontext()
