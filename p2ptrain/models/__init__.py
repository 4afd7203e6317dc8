"""Models by their manifest: families on this machine, blocks, sizes, stages, and the Hugging Face form.

A family describes its models as lists of blocks (`p2ptrain.models.family`). Sizes are computed without torch, so a peer
without room for a model can refuse it at once. Every function with a ``spec`` raises the errors of `get_family`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2ptrain.errors import UsageError
from p2ptrain.extensions import Extensions
from p2ptrain.manifest import Manifest, ModelSpec
from p2ptrain.models.blocks import Block, Span, stage_shapes
from p2ptrain.models.family import Family
from p2ptrain.progress import Progress, no_progress

if TYPE_CHECKING:
    import torch
    from torch import nn

    from p2ptrain.models.stage import Stage

__all__ = [
    "FAMILIES", "Block", "Family", "Span", "blank_stage", "build_model", "build_stage", "check_reads_text",
    "estimate_memory_bytes", "estimate_serving_bytes", "export_hugging_face", "export_tensors", "get_family",
    "has_hugging_face_form", "model_blocks", "num_parameters", "trained_bytes", "whole",
]  # fmt: skip

FAMILIES = Extensions(
    "p2ptrain.models",
    "model family",
    Family,
    {
        "llama": "p2ptrain.models.families.llama:Llama",
        "mistral": "p2ptrain.models.families.llama:Mistral",
        "qwen2": "p2ptrain.models.families.llama:Qwen2",
        "qwen3": "p2ptrain.models.families.llama:Qwen3",
        "gpt2": "p2ptrain.models.families.gpt2:GPT2",
        "vit": "p2ptrain.models.families.vit:ViT",
    },
)

QUANTS = ("int8",)
"""Formats of a stage's frozen parameters, besides fp32."""

PROCESS_BYTES = 420 << 20
"""Resident memory of a process with torch and a model family imported, before any model."""

SERVING_PROCESS_BYTES = 300 << 20
"""Resident memory of a process that serves without training, before any model."""

SERVED_BYTES = {"fp32": 4.0, "int8": 1.1}
"""Memory per served parameter, by format."""

OUTER_MOMENTS = {"average": 0, "nesterov": 1, "adam": 2}
"""Values per parameter that an outer optimizer keeps in the state."""

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
    return tuple(get_family(spec).blocks(spec))


def whole(spec: ModelSpec) -> Span:
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
    buffers (`p2ptrain.models.int8`); at most one of them is in fp32 at a time.

    Raises:
        UsageError: There are no such blocks, or there is no such ``quant``.
        ConfigError: The weights cannot be read, belong to another model, or do not match ``spec.weight_digests``.
    """
    family = get_family(spec)
    if quant is not None and quant not in QUANTS:
        raise UsageError(f"unknown quantization {quant!r}: this version has {', '.join(QUANTS)}")
    from p2ptrain.models.building import build

    return build(family, spec, span, weights, quant, jobs)


def num_parameters(spec: ModelSpec, span: Span | None = None) -> int:
    """Return the number of distinct parameters of a model (tied ones count once), or of a span's own parameters."""
    return sum(block.num_parameters for block in model_blocks(spec)[slice(*(span or whole(spec)))])


def trained_bytes(manifest: Manifest) -> int:
    """Return the memory per trained parameter: value, gradient, AdamW's two moments, and the swarm's vectors.

    These are round start, error feedback, the staged result before its commit, and those of outer optimizer and worker
    momentum, at least one.
    """
    kept = OUTER_MOMENTS[manifest.training.outer] + bool(manifest.averaging.worker_momentum)
    moments = 2 if manifest.pipeline.moments == "8bit" else 8
    return moments + 4 * (1 + 1 + 3 + max(1, kept))


def estimate_memory_bytes(manifest: Manifest, span: Span | None = None, parameter_bytes: float | None = None) -> int:
    """Estimate a trainer's resident memory on the CPU in bytes, daemon excluded.

    Counts the process, the parameters of the span, and the activations of one local batch for its backward pass.

    Args:
        span: None for the whole model.
        parameter_bytes: Memory per parameter if all are frozen (`FROZEN_BYTES`); None if all are trained.
    """
    spec = manifest.model
    family, blocks = get_family(spec), model_blocks(spec)
    span = span or Span(0, len(blocks))
    parameter_bytes = trained_bytes(manifest) if parameter_bytes is None else parameter_bytes
    tokens = manifest.training.local_batch * family.tokens(spec)
    per_layer = 16 * spec.hidden + 5 * spec.intermediate + 4 * spec.kv_heads * spec.width_of_head
    num_layers = min(span.stop, len(blocks) - 1) - max(span.start, 1)
    values = num_layers * per_layer + (4 * family.outputs(spec) if span.stop == len(blocks) else 0)
    held = sum(math.prod(shape) for shape in stage_shapes(blocks, span).values())
    return PROCESS_BYTES + int(parameter_bytes * held) + 4 * tokens * values


def estimate_serving_bytes(spec: ModelSpec, span: Span, weight_bytes: float, cache: int, base_bytes: float = 0) -> int:
    """Estimate the resident memory of a peer that only serves a span, in bytes, daemon excluded.

    Counts the process, two versions of the weights, keys and values, and the rows that sessions keep for substitutes.

    Args:
        weight_bytes: Of a served parameter.
        cache: Bytes of keys and values.
        base_bytes: Of a parameter of the frozen base that adapters need besides; 0 for none.
    """
    blocks, width = model_blocks(spec), spec.width_of_head
    held = sum(math.prod(shape) for shape in stage_shapes(blocks, span).values())
    num_layers = max(1, min(span.stop, len(blocks) - 1) - max(span.start, 1))
    journals = cache * spec.hidden // (num_layers * spec.kv_heads * width)  # Inputs and outputs, keys and values.
    return SERVING_PROCESS_BYTES + int((2 * weight_bytes + base_bytes) * held) + cache + journals


def blank_stage(spec: ModelSpec, span: Span) -> Stage:
    """Return a stage in fp32 on the CPU without values, whose memory the system provides on first use."""
    import torch

    with torch.device("meta"):
        stage = get_family(spec).stage(spec, span)
    return stage.to_empty(device="cpu")


def has_hugging_face_form(spec: ModelSpec) -> bool:
    """True if transformers has such models; others are exported by `export_tensors` alone."""
    return spec.family != "custom" and type(get_family(spec)).hugging_face is not Family.hugging_face


def export_tensors(tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Write ``model.safetensors`` into a folder; an existing one is replaced."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})


def export_hugging_face(model: nn.Module, spec: ModelSpec, directory: Path, tokenizer: str = "bytes") -> None:
    """Write a folder that transformers loads with ``from_pretrained``, with the tokenizer of a language model.

    The tokenizer is the manifest's ``data.tokenizer``: ``bytes`` writes a byte-level one, ``path:DIR`` copies. Existing
    files are overwritten.

    Raises:
        UsageError: The model is in int8, or its family has no such form.
        ConfigError: The tokenizer cannot be read.
    """
    import torch
    from transformers.generation.configuration_utils import GenerationConfig

    from p2ptrain.models.tokenizers import byte_tokenizer, load_pretrained_tokenizer

    family = get_family(spec)
    if any(value.dtype == torch.int8 for value in model.state_dict().values()):
        raise UsageError("a model in int8 cannot be exported: export the one that it was made of, or its adapters")
    settings: Any = family.hugging_face(spec)
    settings.dtype = torch.float32
    state = {name: value.detach().to("cpu", torch.float32).contiguous() for name, value in model.state_dict().items()}
    export_tensors(state, directory)
    if family.reads_text:
        is_bytes = tokenizer == "bytes"
        exporter = byte_tokenizer(spec.context) if is_bytes else load_pretrained_tokenizer(tokenizer)
        # the byte tokenizer has no special tokens; documents end with byte 0 (`p2ptrain.training.data.corpus`)
        settings.eos_token_id = 0 if is_bytes else exporter.eos_token_id
        GenerationConfig.from_model_config(settings).save_pretrained(directory)
        exporter.save_pretrained(directory)
    settings.save_pretrained(directory)
