"""The model families on this machine, by their manifest names.

Sizes are computed without torch, so a peer without room for a model can refuse it at once. Every function with a
``spec`` raises the errors of `get_family`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.errors import UsageError
from p2ptrain.extensions import Extensions
from p2ptrain.manifest import ModelSpec, TrainingSpec
from p2ptrain.models.family import Block, Family, Span, stage_shapes
from p2ptrain.progress import Progress, no_progress

if TYPE_CHECKING:
    from torch import nn

    from p2ptrain.models.stage import Stage

FAMILIES = Extensions(
    "p2ptrain.models",
    "model family",
    Family,
    {
        "llama": "p2ptrain.models.families.llama:Llama",
        "gpt2": "p2ptrain.models.families.gpt2:GPT2",
        "vit": "p2ptrain.models.families.vit:ViT",
    },
)

QUANTS = ("int8",)
"""Formats of a stage's frozen parameters, besides fp32."""

PROCESS_BYTES = 420 << 20
"""Resident memory of a process with torch and a model family imported, before any model."""

TRAINED_BYTES = 4 * (1 + 1 + 2 + 4)
"""Memory per trained fp32 parameter: value, gradient, AdamW's two moments, and the swarm's four vectors: round start,
outer momentum, error feedback, and the staged result before its commit.
"""

MOMENTS_SAVED_BYTES = 6
"""Saving per parameter with AdamW's moments in 8 bits."""

FROZEN_BYTES = {"": 4.0, "int8": 1.1}
"""Memory per frozen parameter, by format; int8 includes its scales, and norms and biases in fp32."""


def get_family(spec: ModelSpec) -> Family:
    """Return the family of a model.

    Raises:
        IncompatibleError: This machine does not know it, or an installed package's entry for it is not a family.
        UsageError: It is ``custom``: only its own script can build it.
        ManifestError: It has no models of these settings.
    """
    if spec.family == "custom":
        raise UsageError("this swarm's model is custom: run the organizer's script, which builds it")
    family = FAMILIES.get(spec.family)
    family.check(spec)
    return family


def check_reads_text(spec: ModelSpec) -> None:
    """Raise `UsageError` for models that cannot learn from a manifest's text."""
    if not get_family(spec).reads_text:
        raise UsageError(f"a {spec.family} model does not learn from text: run the organizer's script, which feeds it")


def model_blocks(spec: ModelSpec) -> tuple[Block, ...]:
    """Return the blocks of a model, without building it."""
    return tuple(get_family(spec).blocks(spec))


def whole(spec: ModelSpec) -> Span:
    """Return the span of all blocks."""
    return Span(0, len(model_blocks(spec)))


def build_model(
    spec: ModelSpec,
    weights: Path | None = None,
    quant: str | None = None,
    jobs: Progress = no_progress,
) -> Stage:
    """Build the whole model: `build_stage` of all its blocks."""
    return build_stage(spec, whole(spec), weights, quant, jobs)


def build_stage(
    spec: ModelSpec,
    span: Span,
    weights: Path | None = None,
    quant: str | None = None,
    jobs: Progress = no_progress,
) -> Stage:
    """Build a span of a model's blocks on the CPU, in training mode, and nothing of the others.

    Without ``weights``, a folder of safetensors files in Hugging Face's layout, the parameters are a pure function of
    ``spec``, bit-identical on every machine. They depend neither on the number of threads nor on the global generators,
    which stay unchanged. ``int8`` as ``quant`` freezes all parameters, and stores linear layers and embeddings as int8
    buffers (`p2ptrain.models.frozen`); at most one of them is in fp32 at a time.

    Raises:
        UsageError: There are no such blocks, or there is no such ``quant``.
        ConfigError: The weights cannot be read, belong to another model, or do not match ``spec.weight_digests``.
    """
    family = get_family(spec)
    if quant is not None and quant not in QUANTS:
        raise UsageError(f"unknown quantization {quant!r}: this version has {', '.join(QUANTS)}")
    from p2ptrain.models.building import build

    return build(family, spec, span, weights, quant, jobs)


def freeze_int8(stage: nn.Module) -> None:
    """Freeze a built stage, such as a custom module's, as `build_stage` does for ``int8``, layer by layer in place."""
    from p2ptrain.models import frozen

    frozen.freeze_int8(stage)


def num_parameters(spec: ModelSpec, span: Span | None = None) -> int:
    """Return the number of distinct parameters of a model (tied ones count once), or of a span's own parameters."""
    return sum(block.num_parameters for block in model_blocks(spec)[slice(*(span or whole(spec)))])


def estimate_memory_bytes(
    spec: ModelSpec, training: TrainingSpec, span: Span | None = None, parameter_bytes: float = TRAINED_BYTES
) -> int:
    """Estimate a trainer's resident memory on the CPU in bytes, daemon excluded.

    Counts the process, the parameters of the span, and the activations of one local batch for its backward pass. Frozen
    parameters need fewer ``parameter_bytes`` (`FROZEN_BYTES`).
    """
    family, blocks = get_family(spec), model_blocks(spec)
    span = span or Span(0, len(blocks))
    tokens = training.local_batch * family.tokens(spec)
    per_layer = 16 * spec.hidden + 5 * spec.intermediate + 4 * spec.kv_heads * (spec.hidden // spec.heads)
    num_layers = min(span.stop, len(blocks) - 1) - max(span.start, 1)
    values = num_layers * per_layer + (4 * family.outputs(spec) if span.stop == len(blocks) else 0)
    held = sum(math.prod(shape) for shape in stage_shapes(blocks, span).values())
    return PROCESS_BYTES + int(parameter_bytes * held) + 4 * tokens * values


def export_hugging_face(model: nn.Module, spec: ModelSpec, directory: Path, tokenizer: str = "bytes") -> None:
    """Write a folder that transformers loads with ``from_pretrained``, with the tokenizer of a language model.

    The tokenizer is the manifest's ``data.tokenizer``: ``bytes`` writes a byte-level one, ``path:DIR`` copies. Existing
    files are overwritten.

    Raises:
        UsageError: The model is in int8, or its family has no such form.
        ConfigError: The tokenizer cannot be read.
    """
    family = get_family(spec)
    from p2ptrain.models.export import export

    export(family, model, spec, directory, tokenizer)
