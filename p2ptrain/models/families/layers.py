"""Building blocks of families: linear layers, normalisation, rotary positions and attention.

Shapes: ``B`` sequences of ``T`` tokens, ``H`` heads of width ``D``.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from p2ptrain.manifest import RopeScaling

Values = TypeVar("Values", torch.Tensor, np.ndarray)
Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, ``[T, D]`` each."""


class Affine(nn.Module):
    """A linear layer whose weight is ``[inputs, outputs]``, as in GPT-2's files."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., inputs]`` to ``[..., outputs]``."""
        return torch.addmm(self.bias, hidden.flatten(0, -2), self.weight).view(*hidden.shape[:-1], -1)


class Embedding(nn.Embedding):
    """An embedding table that can also be the head; both uses are forward passes, for hooks on modules."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Entries ``[...]`` to ``[..., width]``, or values ``[..., width]`` to logits ``[..., entries]``."""
        if inputs.is_floating_point():
            return functional.linear(inputs, self.weight)
        return super().forward(inputs)

    def reset_parameters(self) -> None:
        """Keep the values: on the meta device torch would draw normal values in Python, and import its compiler."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` to ``[..., entries]``."""
        return self(hidden)  # type: ignore[no-any-return]


class RMSNorm(nn.Module):
    """Root mean square layer normalisation (Zhang and Sennrich, 2019), computed in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., width]`` to the same shape and type."""
        exact = hidden.float()
        scaled = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(hidden.dtype)


def stretched(speeds: Values, scaling: RopeScaling | None) -> Values:
    """Return the rotary speeds (radians a position) of a model that was stretched as Llama 3.1 was.

    Waves that turned at least ``high`` times in the context before keep their speed. Those that turned at most ``low``
    times are slower by the factor. Speeds between are a mean of both (Dubey et al., *The Llama 3 Herd of Models*, 2024,
    and transformers' ``llama3``).
    """
    if scaling is None:
        return speeds
    factor, low, high, context = scaling
    share = ((context * speeds / (2 * math.pi) - low) / (high - low)).clip(0, 1)
    return speeds * (share + (1 - share) / factor)


def rotation(
    length: int, width: int, theta: float, like: torch.Tensor, first: int = 0, scaling: RopeScaling | None = None
) -> Rotation:
    """Return rotary position embeddings (Su et al., *RoFormer*, 2021) for ``first`` to ``first + length - 1``.

    ``width`` is ``D`` (even), ``theta`` the base of the wavelengths; ``like`` determines device and type. For
    ``scaling`` see `stretched`.
    """
    speeds = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32, device=like.device) / width)
    speeds = stretched(speeds, scaling)
    positions = torch.arange(first, first + length, dtype=torch.float32, device=like.device)
    angles = torch.outer(positions, speeds).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(heads: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Rotate queries or keys ``[B, H, T, D]`` by their positions: value ``i`` is paired with value ``i + D / 2``."""
    cosines, sines = by
    half = heads.shape[-1] // 2
    turned = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return heads * cosines + turned * sines


def attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    """Scaled dot-product attention, ``[B, T, H * D]``; a key/value head serves ``H / H_kv`` query heads.

    Args:
        queries: ``[B, H, T, D]``, of the last ``T`` positions.
        keys, values: ``[B, H_kv, S, D]``, of all ``S`` positions; ``H_kv`` divides ``H``.
    """
    grouped = queries.shape[1] != keys.shape[1]
    seen, (new, known) = None, (queries.shape[2], keys.shape[2])
    if is_causal and new != known:  # torch aligns its own mask with the first key, not the last.
        seen = torch.ones(new, known, dtype=torch.bool, device=queries.device).tril(known - new)
    mixed = functional.scaled_dot_product_attention(
        queries, keys, values, attn_mask=seen, is_causal=is_causal and seen is None, enable_gqa=grouped
    )
    return mixed.transpose(1, 2).flatten(2)


def split_heads(hidden: torch.Tensor, num_heads: int) -> torch.Tensor:
    """``[B, T, H * D]`` to ``[B, H, T, D]``."""
    return hidden.view(*hidden.shape[:-1], num_heads, -1).transpose(1, 2)
