"""Decoders with rotary positions: the Llama family (Touvron et al., *LLaMA*, 2023), and those that differ in details.

A family has names, shapes, initial values and export; `p2ptrain.models.families.llama_stage` computes them all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from p2ptrain.errors import ManifestError
from p2ptrain.manifest import ModelSpec
from p2ptrain.models.blocks import Block, Shape, Span, layer_blocks
from p2ptrain.models.family import Family

if TYPE_CHECKING:
    from p2ptrain.models.families.llama_stage import LlamaStage

EMBEDDING_STD = 0.02
_RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight")
_STRETCHED = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""The numbers of `ModelSpec.rope_scaling`, by transformers' names."""


class Llama(Family):
    """Decoders with rotary positions, grouped-query attention and gated feed-forward layers; SmolLM2, too."""

    name = "llama"
    settings: ClassVar[Mapping[str, str]] = {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "intermediate": "intermediate_size",
        "vocabulary": "vocab_size",
        "context": "max_position_embeddings",
        "tied_embeddings": "tie_word_embeddings",
        "norm_epsilon": "rms_norm_eps",
    }
    only_settings: ClassVar[tuple[str, ...]] = ("hidden_act", "attention_bias", "mlp_bias", "rope_parameters")
    lookups = frozenset({"model.embed_tokens.weight"})
    architecture: ClassVar[str] = "LlamaForCausalLM"
    """Its class in transformers."""
    fixed: ClassVar[Mapping[str, Any]] = {}
    """Settings of a transformers configuration whose defaults are of another model."""
    has_biases: ClassVar[bool] = False
    """True if queries, keys and values have biases."""
    normalises_heads: ClassVar[bool] = False
    """True if the queries and keys of each head are normalised, before they are rotated."""

    def check(self, spec: ModelSpec) -> None:
        if spec.width_of_head % 2:
            raise ManifestError(
                f"heads of {spec.width_of_head} values: rotary positions turn pairs of values, so give an even"
                " model.head_width, or an even model.hidden / model.heads"
            )

    def blocks(self, spec: ModelSpec) -> Sequence[Block]:
        width, head = spec.hidden, spec.width_of_head
        shapes: dict[str, Shape] = {}
        for name, heads in (("q_proj", spec.heads), ("k_proj", spec.kv_heads), ("v_proj", spec.kv_heads)):
            shapes[f"self_attn.{name}.weight"] = (heads * head, width)
            if self.has_biases:
                shapes[f"self_attn.{name}.bias"] = (heads * head,)
        shapes["self_attn.o_proj.weight"] = (width, spec.heads * head)
        if self.normalises_heads:
            shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
        shapes |= {
            "mlp.gate_proj.weight": (spec.intermediate, width),
            "mlp.up_proj.weight": (spec.intermediate, width),
            "mlp.down_proj.weight": (width, spec.intermediate),
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
        }
        layers = layer_blocks("model.layers", shapes, spec.layers)
        embedding, head_name, table = "model.embed_tokens.weight", "lm_head.weight", (spec.vocabulary, width)
        norm: dict[str, Shape] = {"model.norm.weight": (width,)}
        tied = {head_name: embedding} if spec.tied_embeddings else {}
        head_shapes = norm if tied else {**norm, head_name: table}
        return [Block("embeddings", {embedding: table}), *layers, Block("head", head_shapes, tied)]

    def stage(self, spec: ModelSpec, span: Span) -> LlamaStage:
        from p2ptrain.models.families.llama_stage import LlamaStage

        return LlamaStage(spec, span, self)

    def initial_std(self, spec: ModelSpec, name: str, shape: Shape) -> float | None:
        """Return 0.02 for embeddings and head, ``fan_in ** -0.5`` for other linear layers; 0 for biases.

        Writes to the residual stream have GPT-2's factor ``1 / sqrt(2 * layers)`` (Radford et al., 2019, section 2.3).
        """
        if name.endswith(".bias"):
            return 0.0
        if len(shape) == 1:
            return None
        if "embed_tokens" in name or "lm_head" in name:
            return EMBEDDING_STD
        std = 1 / math.sqrt(shape[1])
        return std / math.sqrt(2 * spec.layers) if name.endswith(_RESIDUAL_OUTPUTS) else std

    def hugging_face(self, spec: ModelSpec) -> object:
        from transformers.models.auto.configuration_auto import AutoConfig

        rotary: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_theta}
        if spec.rope_scaling is not None:
            rotary |= {"rope_type": "llama3", **dict(zip(_STRETCHED, spec.rope_scaling, strict=True))}
        return AutoConfig.for_model(
            self.name,
            **self.translated(spec),
            **self.fixed,
            head_dim=spec.width_of_head,
            architectures=[self.architecture],
            rope_parameters=rotary,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )

    def from_hugging_face(self, config: Any) -> dict[str, Any]:
        rotary, settings = config.rope_parameters, super().from_hugging_face(config)
        width = getattr(config, "head_dim", None)
        if width is not None and width * config.num_attention_heads != config.hidden_size:
            settings["head_width"] = width
        if rotary["rope_type"] == "llama3":
            settings["rope_scaling"] = tuple(rotary[each] for each in _STRETCHED)
        return {**settings, "rope_theta": rotary["rope_theta"]}


class Mistral(Llama):
    """Mistral 7B from version 0.2 on, Nemo, Small: without a sliding window (Jiang et al., *Mistral 7B*, 2023)."""

    name = "mistral"
    architecture = "MistralForCausalLM"
    only_settings = ("hidden_act", "sliding_window", "rope_parameters")
    fixed: ClassVar[Mapping[str, Any]] = {"sliding_window": None}


class Qwen2(Llama):
    """Qwen2 and Qwen2.5 (Yang et al., 2024): queries, keys and values have biases."""

    name = "qwen2"
    architecture = "Qwen2ForCausalLM"
    only_settings = ("hidden_act", "sliding_window", "rope_parameters")
    has_biases = True


class Qwen3(Llama):
    """Qwen3 without experts (Yang et al., 2025): the queries and keys of each head are normalised."""

    name = "qwen3"
    architecture = "Qwen3ForCausalLM"
    only_settings = ("hidden_act", "attention_bias", "sliding_window", "rope_parameters")
    normalises_heads = True
