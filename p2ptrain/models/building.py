"""Builds stages with initial or pretrained parameters, holding nothing beyond the span."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from p2ptrain.errors import ConfigError
from p2ptrain.manifest import ModelSpec
from p2ptrain.models.blocks import Block, Shape, Span, check_span, stage_shapes, stage_ties
from p2ptrain.models.family import Family
from p2ptrain.models.int8 import freeze_int8, frozen_state
from p2ptrain.models.stage import Stage
from p2ptrain.models.weights import Weights, add_parameter, block_digest
from p2ptrain.progress import Progress, no_progress


def build(
    family: Family,
    spec: ModelSpec,
    span: Span,
    weights: Path | None = None,
    quant: str | None = None,
    jobs: Progress = no_progress,
) -> Stage:
    """See `p2ptrain.models.build_stage`."""
    blocks = family.blocks(spec)
    check_span(span, blocks)
    with torch.device("meta"):
        stage = family.stage(spec, span)
        if quant == "int8":
            freeze_int8(stage)
    owners = stage_ties(blocks, span)
    held = {owners.get(name, name): name for name in stage_shapes(blocks, span)}
    state: dict[str, torch.Tensor] = {}

    def take(original: str, value: torch.Tensor) -> None:
        if original in held:
            name = held[original]
            state.update(frozen_state(stage, name, value) if quant else {name: value})

    needed = [number for number, block in enumerate(blocks) if held.keys() & block.shapes.keys()]
    with jobs("building the model", "blocks") as advance:
        source = Weights(weights) if weights is not None else None
        for count, number in enumerate(needed):
            block = blocks[number]
            if source is not None:
                _read(source, spec, number, block, take)
            else:
                for name in held.keys() & block.shapes.keys():
                    take(name, _initial(family, spec, name, block.shapes[name]))
            advance(count + 1, len(needed))
    stage.load_state_dict(state, strict=True, assign=True)
    if quant:
        stage.requires_grad_(False)
    return stage.train()


def _read(
    source: Weights, spec: ModelSpec, number: int, block: Block, take: Callable[[str, torch.Tensor], None]
) -> None:
    """Pass on a block's parameters one by one; raises `ConfigError` at the end if their digest differs."""
    digest = block_digest()
    for name, shape in block.shapes.items():
        value = source.read(name, shape)
        if spec.weight_digests:
            add_parameter(digest, name, value)
        take(name, value)
        del value  # before the next one is read
    if spec.weight_digests and spec.weight_digests[number] != digest.hexdigest():
        raise ConfigError(
            f"the parameters of {block.name} in {source.folder} are not those that the swarm's manifest names:"
            " get the model's files again, of the revision that it names"
        )


def _initial(family: Family, spec: ModelSpec, name: str, shape: Shape) -> torch.Tensor:
    std = family.initial_std(spec, name, shape)
    if not std:
        return torch.ones(shape) if std is None else torch.zeros(shape)
    value = torch.empty(shape)
    deterministic_normal_(value, std, f"{spec.initial_seed} {name}")
    return value


def deterministic_normal_(parameter: torch.Tensor, std: float, key: str) -> None:
    """Fill a contiguous fp32 CPU tensor with nearly normal values of mean 0 that depend on ``key`` alone.

    Peers must start from equal bits, and torch's normal generator gives other bits on CPUs with other vector
    instructions.

    Each value is a sum of four 16-bit integers from Philox, whose stream NumPy keeps stable across versions. It lies
    within 3.5 ``std``. The only rounding is in the final multiplication, which IEEE 754 defines.
    """
    seed = int.from_bytes(hashlib.sha256(f"initial {key}".encode()).digest()[:16], "little")
    words = np.random.Philox(key=seed).random_raw(parameter.numel()).astype("<u8", copy=False)
    sums = words.view("<u2").reshape(-1, 4).sum(axis=1, dtype=np.int32) - 2 * 65535
    variance = 4 * (65536**2 - 1) / 12  # of four independent uniform integers below 65536
    values = sums.astype(np.float32) * np.float32(std / variance**0.5)
    parameter.copy_(torch.from_numpy(values).view(parameter.shape))
