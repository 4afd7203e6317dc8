"""The state that a trainer of the manifest's own model shares with the swarm."""

import logging
from types import SimpleNamespace

import pytest
import torch

from p2ptrain.errors import ResourceError
from p2ptrain.manifest import Manifest, TrainingSpec
from p2ptrain.training.loop import Trainer, TrainingProgress
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


def test_a_checkpoint_that_is_not_saved_names_no_folder_in_the_record(caplog: pytest.LogCaptureFixture) -> None:
    def save() -> None:
        raise ResourceError("cannot save a checkpoint of 3 MiB in /home/ada/ward-7: No space left on device")

    trainer = Trainer.__new__(Trainer)
    trainer.progress, trainer.saver = TrainingProgress(), SimpleNamespace(save=save)  # type: ignore[assignment]
    with caplog.at_level(logging.ERROR):
        trainer._save()
    assert "not saved" in trainer.progress.note
    assert "ward-7" not in trainer.progress.note
    assert "ward-7" in caplog.text
