"""Vision transformers that classify (Dosovitskiy et al., 2021): names, shapes, initial values, export."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from p2ptrain.errors import ManifestError
from p2ptrain.manifest import ModelSpec
from p2ptrain.models.blocks import Block, Shape, Span, layer_blocks
from p2ptrain.models.family import Family

if TYPE_CHECKING:
    from p2ptrain.models.families.vit_stage import ViTStage

STD = 0.02


class ViT(Family):
    """Encoders over the patches of an image; a class token is classified."""

    name = "vit"
    settings: ClassVar[Mapping[str, str]] = {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "intermediate": "intermediate_size",
        "image_size": "image_size",
        "patch_size": "patch_size",
        "channels": "num_channels",
        "norm_epsilon": "layer_norm_eps",
    }
    only_settings = ("hidden_act", "qkv_bias")
    reads_text = False
    lookups = frozenset({"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"})

    def check(self, spec: ModelSpec) -> None:
        if spec.image_size % spec.patch_size:
            raise ManifestError(
                f"model.patch_size = {spec.patch_size} must divide model.image_size = {spec.image_size}"
            )

    def blocks(self, spec: ModelSpec) -> Sequence[Block]:
        width, patches = spec.hidden, (spec.image_size // spec.patch_size) ** 2
        weights: dict[str, Shape] = {
            "attention.attention.query": (width, width),
            "attention.attention.key": (width, width),
            "attention.attention.value": (width, width),
            "attention.output.dense": (width, width),
            "intermediate.dense": (spec.intermediate, width),
            "output.dense": (width, spec.intermediate),
            "layernorm_before": (width,),
            "layernorm_after": (width,),
        }
        shapes: dict[str, Shape] = {}
        for name, shape in weights.items():
            shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]
        embeddings: dict[str, Shape] = {
            "vit.embeddings.cls_token": (1, 1, width),
            "vit.embeddings.position_embeddings": (1, patches + 1, width),
            "vit.embeddings.patch_embeddings.projection.weight": (
                width, spec.channels, spec.patch_size, spec.patch_size,
            ),
            "vit.embeddings.patch_embeddings.projection.bias": (width,),
        }  # fmt: skip
        head: dict[str, Shape] = {
            "vit.layernorm.weight": (width,),
            "vit.layernorm.bias": (width,),
            "classifier.weight": (spec.classes, width),
            "classifier.bias": (spec.classes,),
        }
        layers = layer_blocks("vit.encoder.layer", shapes, spec.layers)
        return [Block("embeddings", embeddings), *layers, Block("head", head)]

    def stage(self, spec: ModelSpec, span: Span) -> ViTStage:
        from p2ptrain.models.families.vit_stage import ViTStage

        return ViTStage(spec, span, spec.layers + 2)

    def initial_std(self, spec: ModelSpec, name: str, shape: Shape) -> float | None:
        if name.endswith(".bias"):
            return 0.0
        return None if len(shape) == 1 else STD

    def hugging_face(self, spec: ModelSpec) -> object:
        from transformers.models.vit.configuration_vit import ViTConfig

        return ViTConfig(
            **self.translated(spec),
            architectures=["ViTForImageClassification"],
            id2label={number: str(number) for number in range(spec.classes)},
        )

    def from_hugging_face(self, config: Any) -> dict[str, Any]:
        return {**super().from_hugging_face(config), "classes": len(config.id2label)}

    def tokens(self, spec: ModelSpec) -> int:
        return (spec.image_size // spec.patch_size) ** 2 + 1

    def inputs(self, spec: ModelSpec) -> Shape:
        return (spec.channels, spec.image_size, spec.image_size)

    def work(self, spec: ModelSpec) -> Sequence[int]:
        """Adjust the base's counts: the class token is no patch, and the head reads it alone."""
        first, *layers, last = super().work(spec)
        tokens = self.tokens(spec)
        return [first // tokens * (tokens - 1), *layers, last // tokens]

    def outputs(self, spec: ModelSpec) -> int:
        return spec.classes
