"""Layers whose weights are int8 buffers: what stages that are not trained themselves are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from p2ptrain.models.families.layers import Affine, Embedding
from p2ptrain.models.int8 import Product, dequantize, int8_linear, quantize


class Int8Linear(nn.Module):
    """A frozen linear layer.

    Args:
        layer: A linear layer, whose bias is kept and whose weight is rounded.

    Attributes:
        weight: int8 ``[outputs, inputs]``.
        scale: fp32 ``[outputs]``.
        transposed: Whether the layer's weight was ``[inputs, outputs]``.
        product: The kernel; None for that of the device.
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
        """The buffers for an fp32 weight of the layer that this was made of."""
        rounded, scale = quantize(weight.t() if self.transposed else weight)
        return {"weight": rounded, "scale": scale}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``[..., inputs]`` to ``[..., outputs]``."""
        outputs = int8_linear(inputs, self.weight, self.scale, self.product)
        return outputs if self.bias is None else outputs + self.bias


class Int8Embedding(nn.Module):
    """A frozen table of embeddings.

    Args:
        table: Whose rows are rounded.

    Attributes:
        weight: int8 ``[entries, width]``.
        scale: fp32 ``[entries]``.
        product: As in `Int8Linear`.
    """

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.product: Product | None = None
        for name, value in self.quantized(table.weight.detach()).items():
            self.register_buffer(name, value)

    def quantized(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """The buffers for an fp32 table."""
        rounded, scale = quantize(weight)
        return {"weight": rounded, "scale": scale}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``[...]`` to ``[..., width]``."""
        return dequantize(
            functional.embedding(ids, self.weight), functional.embedding(ids, self.scale[:, None])[..., 0]
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` to ``[..., entries]``: the head that shares the table."""
        return int8_linear(hidden, self.weight, self.scale, self.product)


Frozen = Int8Linear | Int8Embedding
_REPLACED: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    nn.Linear: Int8Linear,
    Affine: Int8Linear,
    nn.Embedding: Int8Embedding,
    Embedding: Int8Embedding,
}


def freeze_int8(module: nn.Module) -> None:
    """Replace the linear layers and embeddings in a module by frozen int8 ones, and freeze the rest in fp32.

    It is done one by one, and what nobody else refers to is let go at once. Of subclasses that are not known here, such
    as the one in ``nn.MultiheadAttention``, nobody knows how their weight is used: they stay in fp32.
    """
    # A list of all modules would keep the replaced ones.
    for parent in [each for each in module.modules() if type(each) not in _REPLACED]:
        for name in [name for name, _ in parent.named_children()]:
            layer = parent.get_submodule(name)
            if type(layer) in _REPLACED:
                setattr(parent, name, _REPLACED[type(layer)](layer))
            del layer
    module.requires_grad_(False)


def frozen_state(stage: nn.Module, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a stage after `freeze_int8` holds for a parameter of the stage before: its buffers, or the value itself."""
    owner, _, own = name.rpartition(".")
    layer = stage.get_submodule(owner)
    if own == "weight" and isinstance(layer, Frozen):
        return {f"{owner}.{buffer}": held for buffer, held in layer.quantized(value).items()}
    return {name: value}
