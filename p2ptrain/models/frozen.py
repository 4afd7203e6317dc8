"""Layers with int8 weight buffers, for frozen stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from p2ptrain.models.families.layers import Affine, Embedding
from p2ptrain.models.int8 import Product, dequantize, int8_linear, quantize


class Int8Linear(nn.Module):
    """A frozen linear layer: ``weight`` int8 ``[outputs, inputs]``, ``scale`` fp32 ``[outputs]``, original bias.

    Attributes:
        transposed: True if the original weight was ``[inputs, outputs]``.
        product: The kernel; None selects that of the device.
    """

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, layer: nn.Linear | Affine) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.transposed = isinstance(layer, Affine)
        self.product: Product | None = None
        for name, value in self.quantized(layer.weight.detach()).items():
            self.register_buffer(name, value)
        self.bias = layer.bias
        self.requires_grad_(False)

    def quantized(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the buffers for an fp32 weight of the original layer."""
        rounded, scale = quantize(weight.t() if self.transposed else weight)
        return {"weight": rounded, "scale": scale}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = int8_linear(inputs, self.weight, self.scale, self.product)
        return outputs if self.bias is None else outputs + self.bias


class Int8Embedding(nn.Module):
    """A frozen embedding table: ``weight`` int8 ``[entries, width]``, ``scale`` fp32 ``[entries]``."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.product: Product | None = None
        for name, value in self.quantized(table.weight.detach()).items():
            self.register_buffer(name, value)

    def quantized(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the buffers for an fp32 table."""
        rounded, scale = quantize(weight)
        return {"weight": rounded, "scale": scale}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return dequantize(
            functional.embedding(ids, self.weight), functional.embedding(ids, self.scale[:, None])[..., 0]
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` to ``[..., entries]``: the tied head."""
        return int8_linear(hidden, self.weight, self.scale, self.product)


Frozen = Int8Linear | Int8Embedding
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
