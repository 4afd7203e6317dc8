"""The Llama family (Touvron et al., *LLaMA*, 2023), with SmolLM2: names, shapes, initial values, export."""

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


class Llama(Family):
    """Decoders with rotary positions, grouped-query attention and gated feed-forward layers."""

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
    only_settings = ("hidden_act", "attention_bias", "mlp_bias", "rope_parameters", "head_dim")
    lookups = frozenset({"model.embed_tokens.weight"})

    def check(self, spec: ModelSpec) -> None:
        if spec.hidden // spec.heads % 2:
            raise ManifestError(
                f"model.hidden / model.heads = {spec.hidden // spec.heads}: rotary positions turn pairs of values, so "
                "give heads of an even width"
            )

    def blocks(self, spec: ModelSpec) -> Sequence[Block]:
        width, head = spec.hidden, spec.hidden // spec.heads
        shapes: dict[str, Shape] = {
            "self_attn.q_proj.weight": (spec.heads * head, width),
            "self_attn.k_proj.weight": (spec.kv_heads * head, width),
            "self_attn.v_proj.weight": (spec.kv_heads * head, width),
            "self_attn.o_proj.weight": (width, spec.heads * head),
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

        return LlamaStage(spec, span, spec.layers + 2)

    def initial_std(self, spec: ModelSpec, name: str, shape: Shape) -> float | None:
        """Return 0.02 for embeddings and head, ``fan_in ** -0.5`` for other linear layers.

        Writes to the residual stream have GPT-2's factor ``1 / sqrt(2 * layers)`` (Radford et al., 2019, section 2.3).
        """
        if len(shape) == 1:
            return None
        if "embed_tokens" in name or "lm_head" in name:
            return EMBEDDING_STD
        std = 1 / math.sqrt(shape[1])
        return std / math.sqrt(2 * spec.layers) if name.endswith(_RESIDUAL_OUTPUTS) else std

    def hugging_face(self, spec: ModelSpec) -> object:
        from transformers.models.llama.configuration_llama import LlamaConfig

        return LlamaConfig(
            **self.translated(spec),
            architectures=["LlamaForCausalLM"],
            rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )

    def from_hugging_face(self, config: Any) -> dict[str, Any]:
        return {**super().from_hugging_face(config), "rope_theta": config.rope_parameters["rope_theta"]}
