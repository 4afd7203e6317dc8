"""The state that a trainer of the manifest's own model shares with the swarm."""

import torch

from p2ptrain.manifest import Manifest, TrainingSpec
from p2ptrain.training.state.adamw import AdamWStep
from p2ptrain.training.state.initial_state import initial_state
from p2ptrain.training.state.outer_optimizers import AverageStep


def test_with_a_global_batch_it_steps_with_the_adamw_that_has_the_same_bits_everywhere() -> None:
    steppers = {}
    for every in (1, 4):
        manifest = Manifest(name="state", training=TrainingSpec(every=every))
        state = initial_state(torch.nn.Linear(2, 2), None, manifest, manifest.digest)
        steppers[every] = type(state.stepper)
    assert steppers == {1: AdamWStep, 4: AverageStep}
