"""The GPT-2 family (Radford et al., 2019): names, shapes, initial values, export."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from p2ptrain.manifest import ModelSpec
from p2ptrain.models.blocks import Block, Shape, Span, layer_blocks
from p2ptrain.models.family import Family

if TYPE_CHECKING:
    from p2ptrain.models.families.gpt2_stage import GPT2Stage

STD = 0.02


class GPT2(Family):
    """Decoders with learned positions and one key/value head per query head."""

    name = "gpt2"
    lookups = frozenset({"transformer.wte.weight", "transformer.wpe.weight"})
    settings: ClassVar[Mapping[str, str]] = {
        "layers": "n_layer",
        "hidden": "n_embd",
        "heads": "n_head",
        "intermediate": "n_inner",
        "vocabulary": "vocab_size",
        "context": "n_positions",
        "tied_embeddings": "tie_word_embeddings",
        "norm_epsilon": "layer_norm_epsilon",
    }
    only_settings = (
        "activation_function", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "add_cross_attention",
    )  # fmt: skip
    has_fixed_context = True

    def blocks(self, spec: ModelSpec) -> Sequence[Block]:
        width = spec.hidden
        weights: dict[str, Shape] = {
            "ln_1": (width,),
            "attn.c_attn": (width, 3 * width),
            "attn.c_proj": (width, width),
            "ln_2": (width,),
            "mlp.c_fc": (width, spec.intermediate),
            "mlp.c_proj": (spec.intermediate, width),
        }
        shapes: dict[str, Shape] = {}
        for name, shape in weights.items():
            shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[-1:]
        layers = layer_blocks("transformer.h", shapes, spec.layers)
        table: Shape = (spec.vocabulary, width)
        embeddings = {"transformer.wte.weight": table, "transformer.wpe.weight": (spec.context, width)}
        norm: dict[str, Shape] = {"transformer.ln_f.weight": (width,), "transformer.ln_f.bias": (width,)}
        tied = {"lm_head.weight": "transformer.wte.weight"} if spec.tied_embeddings else {}
        head = Block("head", norm if tied else {**norm, "lm_head.weight": table}, tied)
        return [Block("embeddings", embeddings), *layers, head]

    def stage(self, spec: ModelSpec, span: Span) -> GPT2Stage:
        from p2ptrain.models.families.gpt2_stage import GPT2Stage

        return GPT2Stage(spec, span, spec.layers + 2)

    def initial_std(self, spec: ModelSpec, name: str, shape: Shape) -> float | None:
        """Return 0.02, over ``sqrt(2 * layers)`` for writes to the residual stream (section 2.3); 0 for biases."""
        if name.endswith(".bias"):
            return 0.0
        if len(shape) == 1:
            return None
        return STD / math.sqrt(2 * spec.layers) if name.endswith("c_proj.weight") else STD

    def hugging_face(self, spec: ModelSpec) -> object:
        from transformers.models.gpt2.configuration_gpt2 import GPT2Config

        return GPT2Config(
            **self.translated(spec),
            architectures=["GPT2LMHeadModel"],
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )

    def from_hugging_face(self, config: Any) -> dict[str, Any]:
        return {**super().from_hugging_face(config), "intermediate": config.n_inner or 4 * config.n_embd}
