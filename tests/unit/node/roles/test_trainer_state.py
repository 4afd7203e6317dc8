"""What a trainer of the manifest's own model shares with the swarm."""

from types import SimpleNamespace

import torch

from p2ptrain.manifest import Manifest, TrainingSpec
from p2ptrain.node.roles.building import _make_state
from p2ptrain.training.state.adamw import AdamWStep
from p2ptrain.training.state.outer_optimizers import AverageStep


def test_with_a_global_batch_it_steps_with_the_adamw_that_has_the_same_bits_everywhere() -> None:
    steppers = {}
    for every in (1, 4):
        manifest = Manifest(name="state", training=TrainingSpec(every=every))
        peer = SimpleNamespace(manifest=manifest, swarm=manifest.digest)
        _, state = _make_state(peer, torch.nn.Linear(2, 2))  # type: ignore[arg-type]
        steppers[every] = type(state.stepper)
    assert steppers == {1: AdamWStep, 4: AverageStep}
