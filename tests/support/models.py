"""Small models of every family, what goes into them, and folders that hold them."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from p2ptrain.manifest import ModelSpec
from p2ptrain.models import Span

SIZES = {"layers": 3, "hidden": 32, "heads": 4, "intermediate": 48}
SMALL = {**SIZES, "context": 16, "vocabulary": 50}
SPECS = {
    "llama": ModelSpec(family="llama", **SMALL, kv_heads=2, norm_epsilon=1e-6, rope_theta=500.0),
    "llama, untied": ModelSpec(family="llama", **SMALL, tied_embeddings=False),
    "llama, stretched": ModelSpec(family="llama", **SMALL, rope_theta=50.0, rope_scaling=(8.0, 1.0, 4.0, 8)),
    "mistral": ModelSpec(family="mistral", **SMALL, kv_heads=1, tied_embeddings=False, head_width=6),
    "qwen2": ModelSpec(family="qwen2", **SMALL, kv_heads=2, rope_theta=1e6),
    "qwen3": ModelSpec(family="qwen3", **SMALL, kv_heads=2, head_width=10, norm_epsilon=1e-6),
    "gpt2": ModelSpec(family="gpt2", **SMALL),
    "gpt2, untied": ModelSpec(family="gpt2", **SMALL, tied_embeddings=False),
    "vit": ModelSpec(family="vit", **SIZES, norm_epsilon=1e-12, image_size=8, patch_size=2, channels=3, classes=5),
}
each = pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))


def sample(spec: ModelSpec, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if spec.family == "vit":
        return torch.randn(2, spec.channels, spec.image_size, spec.image_size, generator=generator)
    return torch.randint(spec.vocabulary, (2, spec.context - 3), generator=generator)


def input_gradient(
    function: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor, towards: torch.Tensor | None = None
) -> torch.Tensor:
    """The gradient of a function's outputs, or of their mean square, with respect to its inputs."""
    leaf = inputs.clone().requires_grad_()
    outputs = function(leaf)
    torch.autograd.backward(outputs.square().mean() if towards is None else outputs, towards)
    assert leaf.grad is not None
    return leaf.grad


def parts(cuts: set[int], num_blocks: int) -> list[Span]:
    ends = [0, *sorted(cuts), num_blocks]
    return [Span(start, stop) for start, stop in itertools.pairwise(ends)]


def write_shards(parameters: dict[str, torch.Tensor], folder: Path) -> None:
    """Write parameters one to a file, with an index."""
    folder.mkdir()
    index = {}
    for number, (name, value) in enumerate(parameters.items()):
        index[name] = f"model-{number:05}.safetensors"
        save_file({name: value}, folder / index[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def shards(source: Path, folder: Path) -> None:
    """Write the same parameters as a folder's one to a file."""
    write_shards(load_file(source / "model.safetensors"), folder)
