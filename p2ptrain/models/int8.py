"""Products with frozen weights in 8 bits: the arithmetic, and the kernels that do it.

A weight ``[outputs, inputs]`` is one int8 for each value and an fp32 scale for each row, the row's greatest absolute
value over 127 (*LLM.int8()*, Dettmers et al., 2022, section 2.1). Inputs are written in two int8 digits and a scale for
each token: ``scale * (high + low / 254)``. One digit is not enough where some inputs are much larger than the others:
with SmolLM2-135M (`benchmarks.bench_int8`) it costs 3.6 % of perplexity, one digit and LLM.int8's decomposition of
inputs above 6 costs 2.0 %, and two digits 0.17 %, which is what the weights' rounding costs alone. The second digit
doubles the rows of an integer product that is many times as fast as one in fp32, and unlike a decomposition
it leaves each token's result independent of the tokens beside it.

All that is summed up are integers, which is exact. What is left are single IEEE operations on each output, so every
kernel gives the same bits, whatever the batch. The gradient is that of a product with the dequantized weight, as if
inputs were not rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A kernel: int8 ``[rows, inputs]`` times the transposed int8 ``[outputs, inputs]``, as int32 ``[rows, outputs]``."""

_CHUNK_VALUES = 1 << 19
"""Values of a weight that are in fp32 at one time: few enough for a CPU's cache, enough for a fast product."""

_BLOCK_VALUES, _BLOCK_TOKENS = 1 << 20, 64
"""Outputs that are computed at one time: at most so many, of no fewer tokens."""

_EXACT_INPUTS = 1024
"""Products of so many int8 values add up to less than 2 ** 24, below which fp32 is exact."""


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row to 255 steps of its scale.

    Args:
        weight: ``[outputs, inputs]`` in fp32; may be a transposed view. What is made of it meanwhile is small.

    Returns:
        int8 ``[outputs, inputs]``, and the scales ``[outputs]`` in fp32. A row of zeros has the scale 1.
    """
    rounded = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    if weight.is_meta:  # It has a shape and no values; and torch imports its compiler to compute with such.
        return rounded, scale
    for rows in _chunks(weight):
        step = weight[rows].abs().amax(dim=1).float() / 127
        scale[rows] = torch.where(step == 0, 1.0, step)
        rounded[rows] = (weight[rows] / scale[rows, None]).round_().to(torch.int8)
    return rounded, scale


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The fp32 values of what `quantize` returned, or of rows of it."""
    return weight.to(scale.dtype) * scale[..., None]


def digits(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Write inputs in two int8 digits.

    Args:
        inputs: ``[rows, inputs]`` in fp32.

    Returns:
        int8 ``[2 * rows, inputs]``, all high digits and then all low ones, and the scales ``[rows, 1]``. Their error is
        at most ``scale / 508``. A row that is not finite has a scale that is not, and so have its products.
    """
    num = len(inputs)
    scale = inputs.abs().amax(dim=1, keepdim=True).div_(127)
    exact = inputs / scale
    high = exact.round()
    both = torch.empty(2 * num, inputs.shape[1], dtype=torch.int8, device=inputs.device)
    both[:num].copy_(high)
    both[num:].copy_(exact.sub_(high).mul_(254).round_())
    return both, scale


def int8_linear(
    inputs: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, product: Product | None = None
) -> torch.Tensor:
    """A linear layer's output for a weight of `quantize`, with a gradient to the inputs and none to the weight.

    Args:
        inputs: ``[..., inputs]``.
        weight, scale: ``[outputs, inputs]`` and ``[outputs]``, on the inputs' device.
        product: The kernel; None for that of the device.

    Returns:
        ``[..., outputs]`` of the inputs' type.
    """
    chosen = product or (bitsandbytes_product if inputs.is_cuda else torch_product)
    if weight.shape[1] == 1:  # where torch 2.13, to which bitsandbytes turns too, is wrong
        chosen = exact_product
    found: torch.Tensor = _Linear.apply(inputs.flatten(0, -2), weight, scale, chosen)  # type: ignore[no-untyped-call]
    return found.view(*inputs.shape[:-1], len(weight))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, inputs: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, product: Product
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, scale)
        outputs = inputs.new_empty(len(inputs), len(weight))
        step = max(_BLOCK_TOKENS, _BLOCK_VALUES // len(weight))
        for start in range(0, len(inputs), step):
            block = slice(start, start + step)
            both, input_scale = digits(inputs[block].float())
            high, low = product(both, weight).chunk(2)
            exact = low.float().mul_(1 / 254).add_(high).mul_(input_scale)
            torch.mul(exact, scale, out=outputs[block])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        weight, scale = ctx.saved_tensors
        scaled = gradient.float() * scale
        found = scaled.new_zeros(len(scaled), weight.shape[1])
        for rows in _chunks(weight):
            found.addmm_(scaled[:, rows], weight[rows].float())
        return found.to(gradient.dtype), None, None, None


def torch_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """torch's own kernel for int8 on a CPU that has it, else `exact_product`."""
    if not has_int8_product():
        return exact_product(left, right)
    if len(left) > 2:
        return torch._int_mm(left, right.t())
    # Products with a single row are 2 to 9 times as fast as with two.
    return torch.cat([torch._int_mm(left[row : row + 1], right.t()) for row in range(len(left))])


def bitsandbytes_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product of bitsandbytes' ``Linear8bitLt``, for CUDA and, more slowly, for CPUs.

    Without what that layer does before and after in fp16: one digit for inputs, and outputs of 11 bits.
    """
    import bitsandbytes

    found: torch.Tensor = bitsandbytes.functional.int8_linear_matmul(left, right)
    return found


def exact_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The same in fp32, so that it needs no int8 arithmetic: what is summed at one time stays below 2 ** 24."""
    outputs = left.new_zeros(len(left), len(right), dtype=torch.int32)
    for rows in _chunks(right):
        for start in range(0, left.shape[1], _EXACT_INPUTS):
            columns = slice(start, start + _EXACT_INPUTS)
            outputs[:, rows] += (left[:, columns].float() @ right[rows, columns].float().t()).int()
    return outputs


@cache
def has_int8_product() -> bool:
    """Whether torch multiplies int8 matrices on this CPU, fast and right.

    Without AVX-512 it does so value by value, and with it but without VNNI old versions let 16-bit sums saturate.
    """
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    left, right = (torch.full(shape, 127, dtype=torch.int8) for shape in ((4, 64), (32, 64)))
    try:
        found = [torch._int_mm(left[:num], sign * right.t()) for num in (1, 4) for sign in (1, -1)]
    except RuntimeError:
        return False
    return all(bool((each.abs() == 64 * 127**2).all()) for each in found)


def _chunks(weight: torch.Tensor) -> list[slice]:
    """Rows that have about `_CHUNK_VALUES` values together."""
    step = max(1, _CHUNK_VALUES // weight.shape[1])
    return [slice(start, start + step) for start in range(0, len(weight), step)]
