"""Checks of the model and optimizer given to `Swarm.optimizer`, and the step rule that all peers must share."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from p2ptrain.errors import UsageError

_NOT_ARITHMETIC = frozenset({"params", "param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable"})
"""Keys of a parameter group that do not change the result of a step."""


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> list[str]:
    """Raise `UsageError` for an optimizer that cannot train the model with the swarm; return warnings for the log."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"Swarm.optimizer wraps a torch.optim.Optimizer, not {name}")
    if _needs_closure(optimizer):
        raise UsageError(f"{name} evaluates the loss again within a step, which a swarm cannot: use SGD, Adam or AdamW")
    if every == 1 and isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError(f"with every = 1 the swarm averages dense gradients, which {name} refuses: use Adam or AdamW")
    return _check_parameters(model, optimizer)


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    parameters = inspect.signature(type(optimizer).step).parameters
    return "closure" in parameters and parameters["closure"].default is inspect.Parameter.empty


def _check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if foreign := [parameter for parameter in held if id(parameter) not in names]:
        shapes = _listed(str(tuple(parameter.shape)) for parameter in foreign)
        raise UsageError(
            f"the optimizer holds {len(foreign)} of {len(held)} parameters that are not the model's (shapes {shapes}):"
            " make it from this model's parameters, after whatever replaces them"
        )
    if not any(parameter.requires_grad for parameter in held):
        raise UsageError("the optimizer holds no trainable parameter: set requires_grad on what is to be trained")
    known = {id(parameter) for parameter in held}
    unowned = [names[id(p)] for p in model.parameters() if p.requires_grad and id(p) not in known]
    if unowned:
        return [
            f"{len(unowned)} trainable parameters are in no group of the optimizer, never move, and are averaged all"
            f" the same ({_listed(unowned)}): freeze them with requires_grad_(False)"
        ]
    return []


def check_layout_is_kept(model: nn.Module, names: Iterable[str]) -> None:
    """Raise `UsageError` if the set of trainable parameters has changed since ``Swarm.optimizer``.

    ``names`` are the trainable parameters of that time, without the prefix of `torch.compile`.
    """
    now = {n.replace("_orig_mod.", "") for n, p in model.named_parameters() if p.requires_grad}
    if changed := now.symmetric_difference(names):
        raise UsageError(
            f"requires_grad of {_listed(sorted(changed))} changed after Swarm.optimizer: peers share what was trainable"
            " then; freeze and unfreeze before it, the same on all peers"
        )


def step_rule(
    model: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float, schedule: Sequence[float | None] = ()
) -> str:
    """Describe the step on an averaged gradient (``every = 1``), which all peers must take alike.

    Two descriptions are equal if class, hyperparameters per parameter, ``clip_norm`` and ``schedule`` (factors of the
    learning rate at some rounds) are equal.
    """
    names = {id(parameter): name.replace("_orig_mod.", "") for name, parameter in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        settings = {key: _plain(value) for key, value in sorted(group.items()) if key not in _NOT_ARITHMETIC}
        trained = [names[id(parameter)] for parameter in group["params"] if parameter.requires_grad]
        groups.append({**settings, "parameters": trained if len(optimizer.param_groups) > 1 else len(trained)})
    rule = {"optimizer": type(optimizer).__name__, "groups": groups, "clip_norm": float(clip_norm)}
    return json.dumps({**rule, "schedule": list(schedule)})


def differences(ours: str, theirs: str) -> str:
    """Name up to three settings that differ between two descriptions by `step_rule`."""
    try:
        mine, others = _leaves(json.loads(ours or "{}")), _leaves(json.loads(theirs or "{}"))
    except (ValueError, RecursionError):
        return "theirs is not readable"
    different = [key for key in {**mine, **others} if mine.get(key) != others.get(key)]
    return _listed(f"{key} {mine.get(key, '-')} here, {others.get(key, '-')} there"[:80] for key in different)


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _leaves(item, f"{path}.{key}".lstrip(".")).items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {k: v for i, item in enumerate(value) for k, v in _leaves(item, f"{path}.{i}").items()}
    return {path: value}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value) if value.numel() == 1 else str(tuple(value.shape))
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def _listed(items: Iterable[str]) -> str:
    items = list(items)
    return ", ".join(items[:3]) + (", …" if len(items) > 3 else "")
