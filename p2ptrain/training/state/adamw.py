"""AdamW with the same bits on every machine: the step of stages, and of the manifest's own model with ``every = 1``.

Peers share one certified state, but torch's AdamW rounds differently on other CPUs and on GPUs. This one runs on the
CPU vectors in IEEE 754 operations, each rounded by itself as in `p2ptrain.training.state.outer_optimizers`.

Its moments use no GPU memory. Between steps they are fp32, or 8 bits as in Dettmers et al. (arXiv 2110.02861) with
other codes: `Codes` keeps the upper bits of each fp32 value, with an exponent relative to the largest in its block.
That takes integer operations alone, so the bits are equal on every machine, unlike those of bitsandbytes' kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from p2ptrain.manifest import TrainingSpec
from p2ptrain.training.learning_rate import manifest_schedule
from p2ptrain.training.state.layout import Fragment, Layout
from p2ptrain.training.state.outer_optimizers import BLOCK_VALUES, AdamRule, VectorStep, clip_scale, step_buffers

BETA1, BETA2 = 0.9, 0.95
EPSILON = 1e-8

CODE_BLOCK = 256
"""Values that share one exponent."""

_MANTISSA = 23
_LARGEST_EXPONENT = 253
"""Limit of a block's biased exponent; keeps values finite when they are rounded up."""


class AdamWStep(VectorStep):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2) on mean gradients, in `torch.optim.AdamW`'s form.

    For the clipped mean ``gradient`` and step ``t``, from 1::

        vector = vector - rate * weight_decay * vector
        first  = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient * gradient
        vector = vector - rate / (1 - beta1**t) * first / (sqrt(second) / sqrt(1 - beta2**t) + epsilon)

    where ``rate`` follows the manifest's schedule by the round. Buffers take no such step: their differences are
    subtracted. The state is both moments, and the number of steps (exact up to 2**24).
    """

    misfit = "the optimizer's state does not fit: all peers need the same version and manifest"
    unsound = "the optimizer's state is out of range: ask another peer for it"

    def __init__(self, layout: Layout, spec: TrainingSpec, moments: Literal["fp32", "8bit"] = "fp32") -> None:
        self._spec = spec
        self._schedule = manifest_schedule(spec)
        self._num = layout.num_parameters
        kind = Codes if moments == "8bit" else Floats
        self._moments = (kind(self._num), kind(self._num, is_positive=True))
        self._steps = torch.zeros(1, dtype=torch.float32)
        named = zip(("first", "second"), self._moments, strict=True)
        state = [(f"adamw.{name}{part}", tensor) for name, moment in named for part, tensor in moment.tensors()]
        super().__init__(layout, [*state, ("adamw.steps", self._steps)])

    def is_sound(self, values: Sequence[Tensor]) -> bool:
        half = len(values) // 2
        parts = zip(self._moments, (values[:half], values[half:-1]), strict=True)
        return bool((values[-1] >= 0).all()) and all(moment.is_sound(part) for moment, part in parts)

    @torch.no_grad()
    def step(self, vector: Tensor, mean: Tensor, round_: int, fragment: Fragment | None = None) -> None:
        """See `Stepper.step`; ``fragment`` is the whole vector."""
        rate = self._spec.learning_rate * self._schedule(round_)
        self._steps.add_(1.0)
        rule = AdamRule(BETA1, BETA2, EPSILON, rate, int(self._steps))
        clip = clip_scale(mean, self._num, self._spec.clip_norm)
        buffer = torch.empty(3, min(BLOCK_VALUES, self._num), dtype=torch.float32)
        for start in range(0, self._num, BLOCK_VALUES):
            block = slice(start, min(start + BLOCK_VALUES, self._num))
            gradient, *scratch = buffer[:, : block.stop - start]
            values, (first, second) = vector[block], (moment.open(block) for moment in self._moments)
            torch.mul(mean[block], clip, out=gradient)
            torch.mul(values, rate * self._spec.weight_decay, out=scratch[0])
            values.sub_(scratch[0])
            rule.step(values, gradient, first, second, scratch)
            for moment, held in zip(self._moments, (first, second), strict=True):
                moment.close(block, held)
        step_buffers(self._layout, vector, mean, fragment or self._layout.whole)


class Floats:
    """A moment in fp32; `open` gives the values themselves. No value is negative if ``is_positive``."""

    def __init__(self, num: int, *, is_positive: bool = False) -> None:
        self._values = torch.zeros(num, dtype=torch.float32)
        self._is_positive = is_positive

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return the live tensors, by suffix of their names."""
        return [("", self._values)]

    def is_sound(self, tensors: Sequence[Tensor]) -> bool:
        """True if tensors of these shapes and types encode valid finite values."""
        (values,) = tensors
        return bool(torch.isfinite(values).all()) and (not self._is_positive or bool((values >= 0).all()))

    def open(self, block: slice) -> Tensor:
        """Return the values of a block, to be changed in place; the block begins at a multiple of `CODE_BLOCK`."""
        return self._values[block]

    def close(self, block: slice, values: Tensor) -> None:
        """Store the changed values of a block."""


class Codes:
    """A moment in 8-bit codes, with a biased exponent per block; has the methods of `Floats`.

    A code is a sign and 7 bits: steps of an eighth, down to 2**-16 of the largest value in a block; smaller values
    become zero. If ``is_positive`` it is 8 bits: steps of a sixteenth. Then smaller values become the smallest code,
    not zero, because they are a divisor.

    Values are rounded to the nearest code. Without new input a moment loses ``1 - beta`` of its value a step. That is
    more than half the distance of two codes, so rounding does not stop the decay.
    """

    def __init__(self, num: int, *, is_positive: bool = False) -> None:
        self._codes = torch.zeros(num, dtype=torch.uint8)
        self._exponents = torch.zeros(-(-num // CODE_BLOCK), dtype=torch.uint8)
        self._is_positive = is_positive
        self._kept_bits = 4 if is_positive else 3  # of the mantissa
        self._largest = 255 if is_positive else 127  # code of a magnitude; code 0 is zero

    def tensors(self) -> list[tuple[str, Tensor]]:
        return [("", self._codes), ("_exponents/256", self._exponents)]

    def is_sound(self, tensors: Sequence[Tensor]) -> bool:
        return bool((tensors[1] <= _LARGEST_EXPONENT).all())

    def open(self, block: slice) -> Tensor:
        codes = _in_blocks(self._codes[block]).int()
        magnitudes = codes & self._largest
        shifted = magnitudes + (self._top(block) - self._largest)
        bits = shifted.clamp_(min=0) << (_MANTISSA - self._kept_bits)
        bits.masked_fill_(magnitudes == 0, 0)
        values = bits.view(torch.float32)
        if not self._is_positive:
            values = torch.where(codes > self._largest, -values, values)
        return values.view(-1)[: block.stop - block.start]

    def close(self, block: slice, values: Tensor) -> None:
        bits = _in_blocks(values).contiguous().view(torch.int32)
        magnitudes = bits & 0x7FFFFFFF
        exponents = (magnitudes.amax(dim=1) >> _MANTISSA).clamp_(max=_LARGEST_EXPONENT)
        self._exponents[block.start // CODE_BLOCK : -(-block.stop // CODE_BLOCK)] = exponents.to(torch.uint8)
        dropped = _MANTISSA - self._kept_bits
        rounded = (magnitudes + (1 << (dropped - 1))) >> dropped
        codes = rounded - (self._top(block) - self._largest)
        if self._is_positive:
            codes.clamp_(1, self._largest).masked_fill_(magnitudes == 0, 0)
        else:
            codes = codes.clamp_(0, self._largest) | ((bits < 0).int() << 7)
        self._codes[block] = codes.to(torch.uint8).view(-1)[: block.stop - block.start]

    def _top(self, block: slice) -> Tensor:
        """Return what the largest code decodes to per block, as upper bits: the next power of two; ``[blocks, 1]``."""
        exponents = self._exponents[block.start // CODE_BLOCK : -(-block.stop // CODE_BLOCK)].int()
        return ((exponents + 1) << self._kept_bits)[:, None]


def _in_blocks(values: Tensor) -> Tensor:
    missing = -len(values) % CODE_BLOCK
    return (functional.pad(values, (0, missing)) if missing else values).view(-1, CODE_BLOCK)
