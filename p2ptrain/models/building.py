"""Stages with their parameters: the initial ones, or those of a pretrained model. Nothing beyond the span is held."""

from __future__ import annotations

from pathlib import Path

import torch

from p2ptrain.manifest import ModelSpec
from p2ptrain.models.family import Family, Shape, Span, check_span, stage_shapes, stage_ties
from p2ptrain.models.frozen import freeze_int8, frozen_state
from p2ptrain.models.initial import deterministic_normal_
from p2ptrain.models.stage import Stage
from p2ptrain.models.weights import Weights


def build(family: Family, spec: ModelSpec, span: Span, weights: Path | None = None, quant: str | None = None) -> Stage:
    """Build a stage on the CPU, in training mode; see `p2ptrain.models.build_stage`."""
    blocks = family.blocks(spec)
    check_span(span, blocks)
    with torch.device("meta"):
        stage = family.stage(spec, span)
        if quant == "int8":
            freeze_int8(stage)
    source = Weights(weights) if weights is not None else None
    ties = stage_ties(blocks, span)
    state: dict[str, torch.Tensor] = {}
    for name, shape in stage_shapes(blocks, span).items():
        original = ties.get(name, name)
        value = source.read(original, shape) if source else _initial(family, spec, original, shape)
        state |= frozen_state(stage, name, value) if quant else {name: value}
        del value  # before the next one is read
    stage.load_state_dict(state, strict=True, assign=True)
    if quant:
        stage.requires_grad_(False)
    return stage.train()


def _initial(family: Family, spec: ModelSpec, name: str, shape: Shape) -> torch.Tensor:
    std = family.initial_std(spec, name, shape)
    if not std:
        return torch.ones(shape) if std is None else torch.zeros(shape)
    value = torch.empty(shape)
    deterministic_normal_(value, std, f"{spec.initial_seed} {name}")
    return value
