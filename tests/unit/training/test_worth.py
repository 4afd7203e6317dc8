"""Audits of worth: they prove the work of peers that train on their samples, and of nobody else."""

from functools import partial

import numpy as np
import pytest
import torch

from p2ptrain.training.worth import LEAST_AUDITS, LEAST_DEVIATIONS, Score
from tests.support.sim.worth import CONTEXT, PRETENDERS, SAMPLES, AuditedTraining


@pytest.mark.parametrize("kind", PRETENDERS)
def test_work_is_proved_and_what_is_none_is_doubted(kind: str) -> None:
    training = AuditedTraining(seed=7)
    training.play(LEAST_AUDITS, [training.work, partial(PRETENDERS[kind], training)], [SAMPLES, SAMPLES])
    assert training.audits.doubtful == ["peer 1"], training.audits.scores
    assert training.audits.scores["peer 0"].deviations > 2 * LEAST_DEVIATIONS


def test_work_without_samples_is_none() -> None:
    training = AuditedTraining(2)
    training.play(LEAST_AUDITS, [training.work, training.work], [SAMPLES, 0])
    assert training.audits.doubtful == ["peer 1"]


def test_a_peer_that_stops_to_work_is_doubted() -> None:
    training = AuditedTraining(4)
    training.play(LEAST_AUDITS, [training.work, training.work], [SAMPLES, SAMPLES])
    assert not training.audits.doubtful
    training.play(LEAST_AUDITS, [training.work, partial(PRETENDERS["noise"], training)], [SAMPLES, SAMPLES])
    assert training.audits.doubtful == ["peer 1"]


@pytest.mark.parametrize("seed", range(3))
def test_nobody_that_works_is_doubted(seed: int) -> None:
    training = AuditedTraining(seed)
    training.play(LEAST_AUDITS, [training.work, training.work], [SAMPLES, SAMPLES])
    assert all(score.is_proved for score in training.audits.scores.values()), training.audits.scores
    assert not training.audits.doubtful


@pytest.mark.parametrize("kind", ["the last mean", "a copy of another peer's update"])
def test_a_falling_loss_proves_nobodys_work(kind: str) -> None:
    """An update that is any good fits the samples that its sender had to read, but all others as well."""
    training = AuditedTraining(3, rate=3e-4)
    training.play(LEAST_AUDITS, [training.work, partial(PRETENDERS[kind], training)], [SAMPLES, SAMPLES])
    assert training.audits.doubtful == ["peer 1"], training.audits.scores


def test_nobody_is_doubted_where_all_samples_are_alike() -> None:
    training = AuditedTraining(1, np.tile(np.arange(CONTEXT, dtype=np.uint16), 4_000))
    training.play(LEAST_AUDITS, [training.work, training.work], [SAMPLES, SAMPLES])
    assert not training.audits.doubtful


def test_a_score_is_the_mean_and_its_standard_errors() -> None:
    values, score = torch.randn(50, generator=torch.Generator().manual_seed(1)) + 0.3, Score()
    for value in values.tolist():
        score.add(value)
    assert score.audits == 50
    assert score.deviations == pytest.approx(float(values.mean() / values.std() * 50**0.5), rel=1e-5)
    assert Score().deviations == 0.0
