"""Two liars in a group of ten: what a training loses under each rule (row by row in docs/explanation/robustness.md)."""

from functools import lru_cache

import pytest

from p2ptrain.manifest import AveragingSpec, Manifest
from tests.support.sim.attacks import ATTACKS, Outcome, Study

STUDY = Study(seed=0)
MEAN = AveragingSpec(aggregation="mean")
STRICT_CLIP, CENTERED_CLIP = (
    Manifest.model_validate({"admission": {"mode": "open"}, "averaging": {"aggregation": rule}}).averaging
    for rule in ("norm_clip", "centered_clip")
)
"""What an open swarm has by default, and with the other rule by votes."""
WITHIN_THE_NOISE = "more than a little"


@lru_cache
def clean_loss() -> float:
    """The loss of ten honest peers under plain mean."""
    return STUDY.run(MEAN, ATTACKS["nobody lies"], num_hostile=0).loss


def under_attack(spec: AveragingSpec, attack: str) -> tuple[float, Outcome]:
    """The loss with two liars as a multiple of the clean one, and how it went."""
    outcome = STUDY.run(spec, ATTACKS[attack])
    return outcome.loss / clean_loss(), outcome


@pytest.mark.parametrize("spec", [AveragingSpec(), STRICT_CLIP, CENTERED_CLIP], ids=lambda spec: spec.aggregation)
def test_robustness_costs_nothing_where_nobody_lies(spec: AveragingSpec) -> None:
    assert STUDY.run(spec, ATTACKS["nobody lies"], num_hostile=0).loss <= 1.01 * clean_loss()


@pytest.mark.fault(33)
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("spec", [STRICT_CLIP, CENTERED_CLIP], ids=lambda spec: spec.aggregation)
def test_the_strict_rules_hold_the_loss(spec: AveragingSpec, attack: str) -> None:
    assert under_attack(spec, attack)[0] <= 1.05


@pytest.mark.parametrize("spec", [STRICT_CLIP, CENTERED_CLIP], ids=lambda spec: spec.aggregation)
def test_without_worker_momentum_liars_within_the_noise_pass(spec: AveragingSpec) -> None:
    alone = spec.model_copy(update={"worker_momentum": 0.0})
    assert under_attack(alone, WITHIN_THE_NOISE)[0] - 1 >= 1.5 * (under_attack(spec, WITHIN_THE_NOISE)[0] - 1)


@pytest.mark.parametrize("attack", ["sign flip x 10", "inner product x 4"])
def test_the_plain_mean_does_not(attack: str) -> None:
    assert not under_attack(MEAN, attack)[0] <= 1.3


def test_the_default_rule_survives_the_loud() -> None:
    assert under_attack(AveragingSpec(), "sign flip x 10")[0] <= 1.15


@pytest.mark.parametrize("spec", [MEAN, CENTERED_CLIP], ids=lambda spec: spec.aggregation)
def test_the_absurd_are_refused_in_every_round_and_nobody_else(spec: AveragingSpec) -> None:
    ratio, outcome = under_attack(spec, "sign flip x 1000")
    assert ratio <= 1.05
    assert outcome.refused == {8: STUDY.rounds, 9: STUDY.rounds}
