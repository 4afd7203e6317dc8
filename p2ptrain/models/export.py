"""Exports a trained model as a folder for transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers.generation.configuration_utils import GenerationConfig

from p2ptrain.errors import UsageError
from p2ptrain.manifest import ModelSpec
from p2ptrain.models.family import Family
from p2ptrain.models.tokenizers import load_tokenizer


def export(family: Family, model: nn.Module, spec: ModelSpec, directory: Path, tokenizer: str) -> None:
    """See `p2ptrain.models.export_hugging_face`."""
    if any(value.dtype == torch.int8 for value in model.state_dict().values()):
        raise UsageError("a model in int8 cannot be exported: export the one that it was made of, or its adapters")
    settings: Any = family.hugging_face(spec)
    settings.dtype = torch.float32
    state = {name: value.detach().to("cpu", torch.float32).contiguous() for name, value in model.state_dict().items()}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    if family.reads_text:
        exporter = load_tokenizer(tokenizer, spec.context)
        # the byte tokenizer has no special tokens; documents end with byte 0 (`p2ptrain.training.data.corpus`)
        settings.eos_token_id = 0 if tokenizer == "bytes" else exporter.eos_token_id
        GenerationConfig.from_model_config(settings).save_pretrained(directory)
        exporter.save_pretrained(directory)
    settings.save_pretrained(directory)
