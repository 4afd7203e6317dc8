"""Frozen layers with int8 weights: the layers, their arithmetic, and its kernels.

A weight ``[outputs, inputs]`` is one int8 per value and an fp32 scale per row, the row's greatest absolute value over
127 (*LLM.int8()*, Dettmers et al., 2022, section 2.1). Inputs are two int8 digits and a scale per token:
``scale * (high + low / 254)``. One digit loses accuracy where some inputs are much larger than the others. The second
digit is cheap in integer arithmetic. Unlike LLM.int8's decomposition, it keeps each token's result independent of the
other tokens.

Sums are over integers, which is exact. Single IEEE operations on each output follow, so every kernel gives the same
bits for every batch. The gradient is that of a product with the dequantized weight and unrounded inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

from p2ptrain.models.families.layers import Affine, Embedding

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A kernel: int8 ``[rows, inputs]`` times the transposed int8 ``[outputs, inputs]``, as int32 ``[rows, outputs]``."""

_CHUNK_VALUES = 1 << 19
"""Weight values in fp32 at one time: few enough for a CPU's cache, enough for a fast product."""

_BLOCK_VALUES, _BLOCK_TOKENS = 1 << 20, 64
"""Outputs computed at one time: about `_BLOCK_VALUES`, but at least `_BLOCK_TOKENS` tokens."""

_EXACT_INPUTS = 1024
"""Products of this many int8 values add up to less than 2 ** 24, below which fp32 is exact."""


class Frozen(nn.Module):
    """A layer whose ``weight`` is an int8 buffer, with an fp32 ``scale`` for each row.

    Attributes:
        transposed: True if the original weight had a column for each row.
    """

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, weight: torch.Tensor, *, transposed: bool = False) -> None:
        super().__init__()
        self.transposed = transposed
        for name, value in self.quantized(weight.detach()).items():
            self.register_buffer(name, value)

    def quantized(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the buffers for an fp32 weight of the original layer."""
        rounded, scale = quantize(weight.t() if self.transposed else weight)
        return {"weight": rounded, "scale": scale}


class Int8Linear(Frozen):
    """A frozen linear layer: ``weight`` ``[outputs, inputs]``, ``scale`` ``[outputs]``, and the original bias."""

    def __init__(self, layer: nn.Linear | Affine) -> None:
        super().__init__(layer.weight, transposed=isinstance(layer, Affine))
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        self.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = int8_linear(inputs, self.weight, self.scale)
        return outputs if self.bias is None else outputs + self.bias


class Int8Embedding(Frozen):
    """A frozen embedding table: ``weight`` ``[entries, width]``, ``scale`` ``[entries]``."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__(table.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return dequantize(
            functional.embedding(ids, self.weight), functional.embedding(ids, self.scale[:, None])[..., 0]
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` to ``[..., entries]``: the tied head."""
        return int8_linear(hidden, self.weight, self.scale)


_REPLACED: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    nn.Linear: Int8Linear,
    Affine: Int8Linear,
    nn.Embedding: Int8Embedding,
    Embedding: Int8Embedding,
}


def freeze_int8(module: nn.Module) -> None:
    """Replace the linear layers and embeddings of a module by frozen int8 ones, and freeze the rest in fp32.

    Layers are replaced one by one, and unreferenced originals are freed at once. Unknown subclasses, such as the one in
    ``nn.MultiheadAttention``, stay in fp32, because they may use their weight in another way.
    """
    # A list of all modules would keep the replaced ones alive.
    for parent in [each for each in module.modules() if type(each) not in _REPLACED]:
        for name in [name for name, _ in parent.named_children()]:
            layer = parent.get_submodule(name)
            if type(layer) in _REPLACED:
                setattr(parent, name, _REPLACED[type(layer)](layer))
            del layer
    module.requires_grad_(False)


def frozen_state(stage: nn.Module, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a `freeze_int8` stage's entries for a parameter of the original: its buffers, or the value itself."""
    owner, _, own = name.rpartition(".")
    layer = stage.get_submodule(owner)
    if own == "weight" and isinstance(layer, Frozen):
        return {f"{owner}.{buffer}": held for buffer, held in layer.quantized(value).items()}
    return {name: value}


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row of an fp32 ``[outputs, inputs]``, possibly a transposed view, to 255 steps of its scale.

    Returns int8 ``[outputs, inputs]``, and the scales ``[outputs]`` in fp32. A row of zeros has the scale 1.
    """
    rounded = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    if weight.is_meta:  # No values to round, and torch would import its compiler for meta tensors.
        return rounded, scale
    for rows in _chunks(weight):
        step = weight[rows].abs().amax(dim=1).float() / 127
        scale[rows] = torch.where(step == 0, 1.0, step)
        rounded[rows] = (weight[rows] / scale[rows, None]).round_().to(torch.int8)
    return rounded, scale


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values of the result of `quantize`, or of its rows."""
    return weight.to(scale.dtype) * scale[..., None]


def digits(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split inputs ``[rows, inputs]`` in fp32 into two int8 digits, with an error of at most ``scale / 508``.

    Returns int8 ``[2 * rows, inputs]``, all high digits and then all low ones, and the scales ``[rows, 1]``. A row that
    is not finite has a scale that is not finite, and so have its products.
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
    """Map ``[..., inputs]`` to ``[..., outputs]`` of the same type, with weight and scale of `quantize` on its device.

    The gradient flows to the inputs only. ``product`` is the kernel; None selects that of the device.
    """
    chosen = product or (bitsandbytes_product if inputs.is_cuda else torch_product)
    if weight.shape[1] == 1:  # where torch 2.13, also used by bitsandbytes, is wrong
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
    """Use torch's int8 kernel on a CPU that has one, else `exact_product`."""
    if not has_int8_product():
        return exact_product(left, right)
    if len(left) > 2:
        return torch._int_mm(left, right.t())
    # Single-row products are several times as fast as two-row ones.
    return torch.cat([torch._int_mm(left[row : row + 1], right.t()) for row in range(len(left))])


def bitsandbytes_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Use the integer product of bitsandbytes' ``Linear8bitLt``, for CUDA and, more slowly, for CPUs.

    The layer itself would round inputs to one digit and outputs to fp16's 11 bits.
    """
    import bitsandbytes

    found: torch.Tensor = bitsandbytes.functional.int8_linear_matmul(left, right)
    return found


def exact_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Compute the product in fp32, with partial sums below 2 ** 24; needs no int8 arithmetic."""
    outputs = left.new_zeros(len(left), len(right), dtype=torch.int32)
    for rows in _chunks(right):
        for start in range(0, left.shape[1], _EXACT_INPUTS):
            columns = slice(start, start + _EXACT_INPUTS)
            outputs[:, rows] += (left[:, columns].float() @ right[rows, columns].float().t()).int()
    return outputs


@cache
def has_int8_product() -> bool:
    """True if torch multiplies int8 matrices fast and exactly on this CPU.

    Without AVX-512 torch does so value by value; with it but without VNNI, old versions saturate 16-bit sums.
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
    """Return slices of rows with about `_CHUNK_VALUES` values each."""
    step = max(1, _CHUNK_VALUES // weight.shape[1])
    return [slice(start, start + step) for start in range(0, len(weight), step)]
