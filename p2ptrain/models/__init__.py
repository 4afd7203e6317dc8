"""Model families: a manifest's model as a list of blocks, its size, its stages, and its Hugging Face form."""

from p2ptrain.models.family import Block, Family, Span
from p2ptrain.models.registry import (
    FAMILIES,
    build_model,
    build_stage,
    check_reads_text,
    estimate_memory_bytes,
    export_hugging_face,
    freeze_int8,
    get_family,
    model_blocks,
    num_parameters,
    whole,
)

__all__ = [
    "FAMILIES",
    "Block",
    "Family",
    "Span",
    "build_model",
    "build_stage",
    "check_reads_text",
    "estimate_memory_bytes",
    "export_hugging_face",
    "freeze_int8",
    "get_family",
    "model_blocks",
    "num_parameters",
    "whole",
]
