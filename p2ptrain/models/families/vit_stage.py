"""Stages of vision transformers, with the names of transformers' files."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from p2ptrain.manifest import ModelSpec
from p2ptrain.models.blocks import Span
from p2ptrain.models.families.layers import attention, split_heads
from p2ptrain.models.stage import WHOLE, Stage, StageContext, layer_numbers


class _Projections(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))


class _Dense(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, outputs)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.dense(hidden)  # type: ignore[no-any-return]


class _Attention(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.heads = spec.heads
        self.attention = _Projections(spec.hidden)
        self.output = _Dense(spec.hidden, spec.hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        by = self.attention
        queries, keys, values = (split_heads(each(hidden), self.heads) for each in (by.query, by.key, by.value))
        return self.output(attention(queries, keys, values, is_causal=False))  # type: ignore[no-any-return]


class _Layer(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.attention = _Attention(spec)
        self.intermediate = _Dense(spec.hidden, spec.intermediate)
        self.output = _Dense(spec.intermediate, spec.hidden)
        self.layernorm_before = nn.LayerNorm(spec.hidden, spec.norm_epsilon)
        self.layernorm_after = nn.LayerNorm(spec.hidden, spec.norm_epsilon)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.layernorm_before(hidden))
        return hidden + self.output(functional.gelu(self.intermediate(self.layernorm_after(hidden))))  # type: ignore[no-any-return]


class _Patches(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.projection = nn.Conv2d(spec.channels, spec.hidden, spec.patch_size, stride=spec.patch_size)


class _Embeddings(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        patches = (spec.image_size // spec.patch_size) ** 2
        self.cls_token = nn.Parameter(torch.empty(1, 1, spec.hidden))
        self.position_embeddings = nn.Parameter(torch.empty(1, patches + 1, spec.hidden))
        self.patch_embeddings = _Patches(spec)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.patch_embeddings.projection(images).flatten(2).transpose(1, 2)
        return torch.cat((self.cls_token.expand(len(images), -1, -1), patches), dim=1) + self.position_embeddings


class _Encoder(nn.Module):
    layer: nn.ModuleDict


class _Body(nn.Module):
    """Its modules depend on the span."""

    embeddings: _Embeddings
    encoder: _Encoder
    layernorm: nn.LayerNorm


class ViTStage(Stage):
    """Images ``[B, channels, side, side]`` (first stage) or hidden states to hidden states or ``[B, classes]``."""

    def __init__(self, spec: ModelSpec, span: Span, num_blocks: int) -> None:
        super().__init__(span, num_blocks)
        self.spec = spec
        self.vit = _Body()
        if self.is_first:
            self.vit.embeddings = _Embeddings(spec)
        self.vit.encoder = _Encoder()
        self.vit.encoder.layer = nn.ModuleDict(
            {str(number): _Layer(spec) for number in layer_numbers(span, spec.layers)}
        )
        if self.is_last:
            self.vit.layernorm = nn.LayerNorm(spec.hidden, spec.norm_epsilon)
            self.classifier = nn.Linear(spec.hidden, spec.classes)

    def forward(self, inputs: torch.Tensor, context: StageContext = WHOLE) -> torch.Tensor:
        if context != WHOLE:
            raise ValueError("a patch sees those after it: an image is no sequence to go on with")
        hidden = self.vit.embeddings(inputs) if self.is_first else inputs
        for layer in self.vit.encoder.layer.values():
            hidden = layer(hidden)
        return self.classifier(self.vit.layernorm(hidden)[:, 0]) if self.is_last else hidden
