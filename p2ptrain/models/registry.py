"""The model families that this machine builds, by their names in the manifest.

Sizes are computed without importing torch, so that a peer can refuse a model that it has no room for at once.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.errors import UsageError
from p2ptrain.extensions import Extensions
from p2ptrain.manifest import ModelSpec, TrainingSpec
from p2ptrain.models.family import Block, Family, Span, stage_shapes
from p2ptrain.progress import Jobs, untold

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
"""In what a stage's frozen parameters can be held, other than fp32."""

PROCESS_BYTES = 420 << 20
"""Resident memory of a process that has imported torch and a model family, before any model."""

TRAINED_BYTES = 4 * (1 + 1 + 2 + 4)
"""fp32 parameters, gradients, AdamW's two moments, and the swarm's own: round start, outer momentum, what a codec
dropped, and the result that is staged aside until it is committed. Of one parameter."""

MOMENTS_SAVED_BYTES = 6
"""With AdamW's moments in 8 bits, of one parameter."""

FROZEN_BYTES = {"": 4.0, "int8": 1.1}
"""Of one that is not trained, by how it is held; int8 with its scales, and with norms and biases, which are fp32."""


def get_family(spec: ModelSpec) -> Family:
    """The family of a model.

    Raises:
        IncompatibleError: This machine does not know it, or what an installed package gives for it is none.
        UsageError: It is ``custom``: only its own script can build it.
        ManifestError: It has no models of these settings.
    """
    if spec.family == "custom":
        raise UsageError("this swarm's model is custom: run the organizer's script, which builds it")
    family = FAMILIES.get(spec.family)
    family.check(spec)
    return family


def check_reads_text(spec: ModelSpec) -> None:
    """Refuse models that cannot learn from a manifest's text.

    Raises:
        UsageError: It is none that says which token comes next: only a script can bring what it learns from.
        IncompatibleError, ManifestError: As in `get_family`.
    """
    if not get_family(spec).reads_text:
        raise UsageError(f"a {spec.family} model does not learn from text: run the organizer's script, which feeds it")


def model_blocks(spec: ModelSpec) -> tuple[Block, ...]:
    """The blocks that a model is made of, without building it.

    Raises:
        IncompatibleError, UsageError, ManifestError: As in `get_family`.
    """
    return tuple(get_family(spec).blocks(spec))


def whole(spec: ModelSpec) -> Span:
    """The span of all blocks; raises as `get_family`."""
    return Span(0, len(model_blocks(spec)))


def build_model(
    spec: ModelSpec,
    weights: Path | None = None,
    quant: str | None = None,
    jobs: Jobs = untold,
) -> Stage:
    """Build the whole model: `build_stage` of all its blocks."""
    return build_stage(spec, whole(spec), weights, quant, jobs)


def build_stage(
    spec: ModelSpec,
    span: Span,
    weights: Path | None = None,
    quant: str | None = None,
    jobs: Jobs = untold,
) -> Stage:
    """Build a span of a model's blocks on the CPU, in training mode, and hold nothing of the others.

    Without ``weights`` its parameters are a pure function of ``spec``: bit-identical on every machine, whatever the
    number of threads and the state of the global generators, which are left as they were.

    Args:
        spec: The whole model's.
        span: Which blocks.
        weights: A folder of safetensors files of a pretrained model, as Hugging Face's tools write it.
        quant: None for parameters in fp32. ``int8`` freezes all of them, and holds those of linear layers and
            embeddings as int8 buffers (`p2ptrain.models.frozen`), a quarter of the memory; one by one, so that
            while it is built there is never more than one in fp32.
        jobs: Told how far it is.

    Raises:
        IncompatibleError, UsageError, ManifestError: As in `get_family`.
        UsageError: There are no such blocks, or there is no such ``quant``.
        ConfigError: The weights cannot be read, are another model's, or are not those of ``spec.weight_digests``.
    """
    family = get_family(spec)
    if quant is not None and quant not in QUANTS:
        raise UsageError(f"unknown quantization {quant!r}: this version has {', '.join(QUANTS)}")
    from p2ptrain.models.building import build

    return build(family, spec, span, weights, quant, jobs)


def freeze_int8(stage: nn.Module) -> None:
    """Freeze a stage that is built already, such as one of a module of one's own, as `build_stage` does for ``int8``.

    Linear layers and embeddings are replaced in place, one by one, in whatever else holds the same modules, too.
    """
    from p2ptrain.models import frozen

    frozen.freeze_int8(stage)


def num_parameters(spec: ModelSpec, span: Span | None = None) -> int:
    """How many different parameters `build_model` makes (tied ones count once), or a span's blocks have of their own.

    Raises:
        IncompatibleError, UsageError, ManifestError: As in `get_family`.
    """
    return sum(block.num_parameters for block in model_blocks(spec)[slice(*(span or whole(spec)))])


def estimate_memory_bytes(
    spec: ModelSpec, training: TrainingSpec, span: Span | None = None, parameter_bytes: float = TRAINED_BYTES
) -> int:
    """About how much resident memory a trainer of this model needs on the CPU, in bytes, daemon not included.

    Counts the process, the parameters, and the activations that one local batch keeps for its backward pass.

    Args:
        spec: The model.
        training: Its local batch.
        span: What of it the peer holds; None for all of it.
        parameter_bytes: For one parameter; less where it is frozen (`FROZEN_BYTES`).

    Raises:
        IncompatibleError, UsageError, ManifestError: As in `get_family`.
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
    """Write a folder that transformers loads with ``from_pretrained``, the tokenizer of a language model with it.

    Args:
        model: What `build_model` returned, trained.
        spec: What it was built from.
        directory: Created as needed; files of the same names are overwritten.
        tokenizer: The manifest's ``data.tokenizer``: ``bytes`` writes a byte-level tokenizer, ``path:DIR`` copies.

    Raises:
        IncompatibleError, UsageError, ManifestError: As in `get_family`.
        UsageError: The model is in int8, or its family has no such form.
        ConfigError: The tokenizer cannot be read.
    """
    family = get_family(spec)
    from p2ptrain.models.export import export

    export(family, model, spec, directory, tokenizer)
