"""The model families that this version builds, by their names in the manifest.

Sizes are computed without importing torch, so that a peer can refuse a model that it has no room for at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.errors import IncompatibleError, UsageError
from p2ptrain.manifest import ModelSpec, TrainingSpec

if TYPE_CHECKING:
    from torch import nn

_PROCESS_BYTES = 420 << 20
"""Resident memory of a process that has imported torch and a model family, before any model."""

_BYTES_PER_PARAMETER = 4 * (1 + 1 + 2 + 4)
"""fp32 parameters, gradients, AdamW's two moments, and the swarm's own: round start, outer momentum, what a codec
dropped, and the result that is staged aside until it is committed."""


def model_families() -> tuple[str, ...]:
    """The families that `build_model` accepts."""
    return ("llama",)


def build_model(spec: ModelSpec) -> nn.Module:
    """Build the model on the CPU in fp32, in training mode.

    Its initial parameters are a pure function of ``spec``: bit-identical on every machine, whatever the number of
    threads and the state of the global generators, which are left as they were.

    Raises:
        IncompatibleError: This version does not know the family.
        UsageError: The family is ``custom``: only its own script can build it.
    """
    _check_family(spec)
    from p2ptrain.models import llama

    return llama.build(spec)


def num_parameters(spec: ModelSpec) -> int:
    """How many different parameters `build_model` makes (tied ones count once), without building it.

    Raises:
        IncompatibleError, UsageError: As in `build_model`.
    """
    _check_family(spec)
    head = spec.hidden // spec.heads
    attention = 2 * spec.hidden * spec.heads * head + 2 * spec.hidden * spec.kv_heads * head
    feed_forward = 3 * spec.hidden * spec.intermediate
    norms = 2 * spec.hidden
    embeddings = spec.vocabulary * spec.hidden * (1 if spec.tied_embeddings else 2)
    return spec.layers * (attention + feed_forward + norms) + spec.hidden + embeddings


def estimate_memory_bytes(spec: ModelSpec, training: TrainingSpec) -> int:
    """About how much resident memory a trainer of this model needs on the CPU, in bytes, daemon not included.

    Counts the process, 32 bytes per parameter, and the activations that one local batch keeps for its backward pass.

    Raises:
        IncompatibleError, UsageError: As in `build_model`.
    """
    tokens = training.local_batch * spec.context
    per_layer = 16 * spec.hidden + 5 * spec.intermediate + 4 * spec.kv_heads * (spec.hidden // spec.heads)
    activations = 4 * tokens * (spec.layers * per_layer + 4 * spec.vocabulary)
    return _PROCESS_BYTES + _BYTES_PER_PARAMETER * num_parameters(spec) + activations


def export_hugging_face(model: nn.Module, spec: ModelSpec, directory: Path, tokenizer: str = "bytes") -> None:
    """Write a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` load with ``from_pretrained``.

    Args:
        model: What `build_model` returned, trained.
        spec: What it was built from.
        directory: Created as needed; files of the same names are overwritten.
        tokenizer: The manifest's ``data.tokenizer``: ``bytes`` writes a byte-level tokenizer, ``path:DIR`` copies.

    Raises:
        IncompatibleError, UsageError: As in `build_model`.
        ConfigError: The tokenizer cannot be read.
    """
    _check_family(spec)
    from p2ptrain.models import llama

    llama.export(model, spec, directory, tokenizer)


def _check_family(spec: ModelSpec) -> None:
    if spec.family == "custom":
        raise UsageError("this swarm's model is custom: run the organizer's script, which builds it")
    if spec.family not in model_families():
        known = ", ".join(model_families())
        raise IncompatibleError(
            f"unknown model family {spec.family!r}; this version has {known}: correct the name or update p2ptrain"
        )
