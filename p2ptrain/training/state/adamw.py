"""AdamW with the same bits on every machine: the step of stages, and of the manifest's own model with ``every = 1``.

Peers share one certified state, but torch's AdamW rounds differently on other CPUs and on GPUs. This one runs on the
CPU vectors in IEEE 754 operations, each rounded by itself as in `p2ptrain.training.state.outer_optimizers`. Its moments
use no GPU memory, and may be held in 8 bits (`p2ptrain.training.state.moments`).
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from p2ptrain.errors import IncompatibleError
from p2ptrain.manifest import TrainingSpec
from p2ptrain.training.learning_rate import manifest_schedule
from p2ptrain.training.state.digest import NamedTensors
from p2ptrain.training.state.fragments import Fragment
from p2ptrain.training.state.layout import Layout
from p2ptrain.training.state.moments import Floats, Moment, PositiveCodes, SignedCodes
from p2ptrain.training.state.outer_optimizers import BLOCK_VALUES, Stepper, clip_scale, power, step_buffers, whole

BETA1, BETA2 = 0.9, 0.95
EPSILON = 1e-8


class AdamWStep(Stepper):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2) on mean gradients, in `torch.optim.AdamW`'s form.

    For the clipped mean ``gradient`` and step ``t``, from 1::

        vector = vector - rate * weight_decay * vector
        first  = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient * gradient
        vector = vector - rate / (1 - beta1**t) * first / (sqrt(second) / sqrt(1 - beta2**t) + epsilon)

    where ``rate`` follows the manifest's schedule by the round. Buffers take no such step: their differences are
    subtracted.
    """

    def __init__(self, layout: Layout, spec: TrainingSpec, moments: Literal["fp32", "8bit"] = "fp32") -> None:
        self._spec = spec
        self._schedule = manifest_schedule(spec)
        self._layout = layout
        self._num = layout.num_parameters
        if moments == "8bit":
            self._moments: list[Moment] = [SignedCodes(self._num), PositiveCodes(self._num)]
        else:
            self._moments = [Floats(self._num), Floats(self._num, is_positive=True)]
        self._steps = torch.zeros(1, dtype=torch.float32)

    def state_tensors(self) -> list[tuple[str, Tensor]]:
        """Return both moments, and the number of steps (exact up to 2**24)."""
        named = zip(("first", "second"), self._moments, strict=True)
        tensors = [(f"adamw.{name}{part}", tensor) for name, moment in named for part, tensor in moment.tensors()]
        return [*tensors, ("adamw.steps", self._steps)]

    def load_state_tensors(self, tensors: NamedTensors) -> None:
        own = self.state_tensors()
        if _shapes(tensors) != _shapes(own):
            raise IncompatibleError("the optimizer's state does not fit: all peers need the same version and manifest")
        values = [tensor for _, tensor in tensors]
        sound = bool((values[-1] >= 0).all())
        for moment in self._moments:
            count = len(moment.tensors())
            sound = sound and moment.is_sound(values[:count])
            del values[:count]
        if not sound:
            raise IncompatibleError("the optimizer's state is out of range: ask another peer for it")
        for (_, mine), (_, theirs) in zip(own, tensors, strict=True):
            mine.copy_(theirs)

    @torch.no_grad()
    def step(self, vector: Tensor, mean: Tensor, round_: int, fragment: Fragment | None = None) -> None:
        """See `Stepper.step`; ``fragment`` is the whole vector."""
        rate = self._spec.learning_rate * self._schedule(round_)
        self._steps.add_(1.0)
        taken = int(self._steps)
        step_size = rate / (1.0 - power(BETA1, taken))
        correction = math.sqrt(1.0 - power(BETA2, taken))
        clip = clip_scale(mean, self._num, self._spec.clip_norm)
        buffers = [torch.empty(min(BLOCK_VALUES, self._num), dtype=torch.float32) for _ in range(2)]
        for start in range(0, self._num, BLOCK_VALUES):
            block = slice(start, min(start + BLOCK_VALUES, self._num))
            gradient, part = (buffer[: block.stop - start] for buffer in buffers)
            values, (first, second) = vector[block], (moment.open(block) for moment in self._moments)
            torch.mul(mean[block], clip, out=gradient)
            torch.mul(values, rate * self._spec.weight_decay, out=part)
            values.sub_(part)
            torch.mul(gradient, 1.0 - BETA1, out=part)
            first.mul_(BETA1).add_(part)
            torch.mul(gradient, gradient, out=part)
            part.mul_(1.0 - BETA2)
            second.mul_(BETA2).add_(part)
            np.sqrt(second.numpy(), out=part.numpy())
            part.div_(correction).add_(EPSILON)
            torch.mul(first, step_size, out=gradient)
            values.sub_(gradient.div_(part))
            for moment, held in zip(self._moments, (first, second), strict=True):
                moment.close(block, held)
        step_buffers(self._layout, vector, mean, fragment or whole(self._layout))


def _shapes(tensors: NamedTensors) -> list[tuple[str, torch.Size, torch.dtype]]:
    return [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]
