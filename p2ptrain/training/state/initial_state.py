"""The initial state of a lineage: the model's parameters, and the shared optimizer that the manifest names."""

from __future__ import annotations

import torch

from p2ptrain.averaging.protocol.certificate import genesis
from p2ptrain.manifest import Manifest
from p2ptrain.training.learning_rate import WrappedOptimizer
from p2ptrain.training.optimizer_checks import step_rule
from p2ptrain.training.state.adamw import AdamWStep
from p2ptrain.training.state.layout import Fragments, Layout
from p2ptrain.training.state.outer_optimizers import AdamStep, AverageStep, GradientStep, NesterovStep, Stepper
from p2ptrain.training.state.shared_state import SharedState


def initial_state(
    model: torch.nn.Module, wrapped: WrappedOptimizer | None, manifest: Manifest, swarm: bytes
) -> SharedState:
    """Return the initial shared state of a lineage, with the model's current parameters.

    Args:
        wrapped: With ``every = 1``: steps on the averaged gradient, with shared state. None for the manifest's AdamW,
            with the same bits on every machine.
        swarm: The manifest's digest, 32 bytes.

    Raises:
        ValueError: The model has too few blocks for the manifest's number of fragments, or lacks a personal tensor.
    """
    spec = manifest.training
    rule = ""  # The manifest's own rule.
    if spec.every == 1 and wrapped is not None:
        rule = step_rule(model, wrapped.optimizer, wrapped.clip_norm, wrapped.rates.sample())
    layout = Layout.from_module(model, rule, manifest.private.personal if manifest.private else ())
    stepper: Stepper
    if spec.every == 1:
        stepper = AdamWStep(layout, spec) if wrapped is None else GradientStep(wrapped, model, layout)
    elif spec.outer == "nesterov":
        stepper = NesterovStep(layout, spec.outer_learning_rate, spec.outer_momentum)
    elif spec.outer == "adam":
        stepper = AdamStep(
            layout, spec.outer_learning_rate, spec.outer_momentum, spec.outer_second_momentum, spec.outer_epsilon,
            spec.fragments,
        )  # fmt: skip
    else:
        stepper = AverageStep(layout, spec.outer_learning_rate)
    state = SharedState(model, layout, stepper, Fragments(layout, spec.fragments))
    state.head = genesis(swarm, state.tree().root)
    return state
