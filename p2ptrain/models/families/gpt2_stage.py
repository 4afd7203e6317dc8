"""Stages of the GPT-2 family, with the names, operations and order of operations of transformers' implementation."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from p2ptrain.manifest import ModelSpec
from p2ptrain.models.blocks import Span
from p2ptrain.models.families.layers import Affine, Embedding, attention, split_heads
from p2ptrain.models.stage import WHOLE, LayerCache, Stage, StageContext, layer_numbers


class _Attention(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.heads = spec.heads
        self.c_attn = Affine(spec.hidden, 3 * spec.hidden)
        self.c_proj = Affine(spec.hidden, spec.hidden)

    def forward(self, hidden: torch.Tensor, cache: LayerCache | None) -> torch.Tensor:
        queries, keys, values = (split_heads(each, self.heads) for each in self.c_attn(hidden).chunk(3, dim=-1))
        if cache is not None:
            keys, values = cache.extend(keys, values)
        return self.c_proj(attention(queries, keys, values, is_causal=True))  # type: ignore[no-any-return]


class _FeedForward(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.c_fc = Affine(spec.hidden, spec.intermediate)
        self.c_proj = Affine(spec.intermediate, spec.hidden)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.c_proj(functional.gelu(self.c_fc(hidden), approximate="tanh"))  # type: ignore[no-any-return]


class _Layer(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(spec.hidden, spec.norm_epsilon)
        self.attn = _Attention(spec)
        self.ln_2 = nn.LayerNorm(spec.hidden, spec.norm_epsilon)
        self.mlp = _FeedForward(spec)

    def forward(self, hidden: torch.Tensor, cache: LayerCache | None) -> torch.Tensor:
        hidden = hidden + self.attn(self.ln_1(hidden), cache)
        return hidden + self.mlp(self.ln_2(hidden))  # type: ignore[no-any-return]


class _Body(nn.Module):
    """Its modules depend on the span."""

    wte: Embedding
    wpe: Embedding
    h: nn.ModuleDict
    ln_f: nn.LayerNorm


class GPT2Stage(Stage):
    """Token ids ``[B, T]`` (first stage) or hidden states ``[B, T, hidden]`` to hidden states or logits (last)."""

    def __init__(self, spec: ModelSpec, span: Span, num_blocks: int) -> None:
        super().__init__(span, num_blocks)
        self.spec = spec
        self.transformer = _Body()
        if self.is_first:
            self.transformer.wte = Embedding(spec.vocabulary, spec.hidden)
            self.transformer.wpe = Embedding(spec.context, spec.hidden)
        self.transformer.h = nn.ModuleDict({str(number): _Layer(spec) for number in layer_numbers(span, spec.layers)})
        if self.is_last:
            self.transformer.ln_f = nn.LayerNorm(spec.hidden, spec.norm_epsilon)
            if not (self.is_first and spec.tied_embeddings):
                self.lm_head = nn.Linear(spec.hidden, spec.vocabulary, bias=False)

    def forward(self, inputs: torch.Tensor, context: StageContext = WHOLE) -> torch.Tensor:
        hidden = inputs
        if self.is_first:
            positions = torch.arange(context.first, context.first + inputs.shape[1], device=inputs.device)
            hidden = self.transformer.wte(inputs) + self.transformer.wpe(positions.expand(inputs.shape))
        for number, layer in self.transformer.h.items():
            hidden = layer(hidden, context.cache(number))
        if not self.is_last:
            return hidden
        hidden = self.transformer.ln_f(hidden)
        if self.is_first and self.spec.tied_embeddings:
            return self.transformer.wte.logits(hidden)
        return self.lm_head(hidden)  # type: ignore[no-any-return]
