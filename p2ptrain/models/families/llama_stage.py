"""Stages of the Llama family, with the names, operations and order of operations of transformers' implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from p2ptrain.manifest import ModelSpec
from p2ptrain.models.blocks import Span
from p2ptrain.models.families.layers import Embedding, RMSNorm, Rotation, attention, rotate, rotation, split_heads
from p2ptrain.models.stage import WHOLE, LayerCache, Stage, StageContext, layer_numbers

if TYPE_CHECKING:
    from p2ptrain.models.families.llama import Llama


class _Attention(nn.Module):
    def __init__(self, spec: ModelSpec, family: Llama) -> None:
        super().__init__()
        head, bias = spec.width_of_head, family.has_biases
        self.heads, self.kv_heads = spec.heads, spec.kv_heads
        self.q_proj = nn.Linear(spec.hidden, spec.heads * head, bias=bias)
        self.k_proj = nn.Linear(spec.hidden, spec.kv_heads * head, bias=bias)
        self.v_proj = nn.Linear(spec.hidden, spec.kv_heads * head, bias=bias)
        self.o_proj = nn.Linear(spec.heads * head, spec.hidden, bias=False)
        if family.normalises_heads:
            self.q_norm = RMSNorm(head, spec.norm_epsilon)
            self.k_norm = RMSNorm(head, spec.norm_epsilon)
        self._normalises_heads = family.normalises_heads

    def forward(self, hidden: torch.Tensor, by: Rotation, cache: LayerCache | None) -> torch.Tensor:
        queries = split_heads(self.q_proj(hidden), self.heads)
        keys = split_heads(self.k_proj(hidden), self.kv_heads)
        values = split_heads(self.v_proj(hidden), self.kv_heads)
        if self._normalises_heads:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = rotate(queries, by), rotate(keys, by)
        if cache is not None:
            keys, values = cache.extend(keys, values)
        return self.o_proj(attention(queries, keys, values, is_causal=True))  # type: ignore[no-any-return]


class _FeedForward(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden, spec.intermediate, bias=False)
        self.up_proj = nn.Linear(spec.hidden, spec.intermediate, bias=False)
        self.down_proj = nn.Linear(spec.intermediate, spec.hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))  # type: ignore[no-any-return]


class _Layer(nn.Module):
    def __init__(self, spec: ModelSpec, family: Llama) -> None:
        super().__init__()
        self.self_attn = _Attention(spec, family)
        self.mlp = _FeedForward(spec)
        self.input_layernorm = RMSNorm(spec.hidden, spec.norm_epsilon)
        self.post_attention_layernorm = RMSNorm(spec.hidden, spec.norm_epsilon)

    def forward(self, hidden: torch.Tensor, by: Rotation, cache: LayerCache | None) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), by, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class _Body(nn.Module):
    """Its modules depend on the span."""

    embed_tokens: Embedding
    layers: nn.ModuleDict
    norm: RMSNorm


class LlamaStage(Stage):
    """Token ids ``[B, T]`` (first stage) or hidden states ``[B, T, hidden]`` to hidden states or logits (last)."""

    def __init__(self, spec: ModelSpec, span: Span, family: Llama) -> None:
        super().__init__(span, spec.layers + 2)
        self.spec = spec
        self.model = _Body()
        if self.is_first:
            self.model.embed_tokens = Embedding(spec.vocabulary, spec.hidden)
        numbers = layer_numbers(span, spec.layers)
        self.model.layers = nn.ModuleDict({str(number): _Layer(spec, family) for number in numbers})
        if self.is_last:
            self.model.norm = RMSNorm(spec.hidden, spec.norm_epsilon)
            if not (self.is_first and spec.tied_embeddings):
                self.lm_head = nn.Linear(spec.hidden, spec.vocabulary, bias=False)

    def forward(self, inputs: torch.Tensor, context: StageContext = WHOLE) -> torch.Tensor:
        hidden: torch.Tensor = self.model.embed_tokens(inputs) if self.is_first else inputs
        spec, length = self.spec, hidden.shape[1]
        by = rotation(length, spec.width_of_head, spec.rope_theta, hidden, context.first, spec.rope_scaling)
        for number, layer in self.model.layers.items():
            hidden = layer(hidden, by, context.cache(number))
        if not self.is_last:
            return hidden
        hidden = self.model.norm(hidden)
        if self.is_first and self.spec.tied_embeddings:
            return self.model.embed_tokens.logits(hidden)
        return self.lm_head(hidden)  # type: ignore[no-any-return]
