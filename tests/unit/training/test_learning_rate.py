"""The schedule is pure, warms up linearly, and ends where it says."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import pytest

from p2ptrain.manifest import TrainingSpec
from p2ptrain.training.learning_rate import learning_rate_factor, manifest_schedule


def test_warm_up_is_linear_and_never_zero_and_the_rate_stays() -> None:
    assert [learning_rate_factor(step, warmup_steps=4) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate_factor(0, warmup_steps=0) == 1.0
    schedule = manifest_schedule(TrainingSpec(warmup_steps=4))
    assert [schedule(step) for step in (0, 3, 4, 10**6)] == [0.25, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("training", [{"every": 1, "rounds": 110}, {"every": 20, "fragments": 2, "rounds": 11}])
def test_a_manifest_s_cosine_falls_from_one_to_its_end_with_its_rounds(training: dict[str, Any]) -> None:
    schedule = manifest_schedule(TrainingSpec(warmup_steps=10, schedule="cosine", final_rate=0.2, **training))
    assert [schedule(step) for step in (0, 9, 10)] == [0.1, 1.0, 1.0]
    factors = [schedule(step) for step in range(10, 150)]
    assert factors == sorted(factors, reverse=True)
    assert factors[50] == pytest.approx(0.6)
    assert factors[100:] == pytest.approx([0.2] * 40)


def test_the_cosine_has_the_same_bits_on_every_machine() -> None:
    schedule = manifest_schedule(TrainingSpec(every=1, warmup_steps=0, schedule="cosine", rounds=1000))
    found = [schedule(step) for step in range(1001)]
    exact = [0.1 + 0.45 * (1 + math.cos(math.pi * step / 1000)) for step in range(1001)]
    assert found == pytest.approx(exact, abs=1e-15)
    digest = hashlib.sha256("".join(value.hex() for value in found).encode()).hexdigest()
    assert digest == "acbcf2095c46191216c492a123393ccc96e404cf542f6bd4de3b704ec244f527"


def test_impossible_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        learning_rate_factor(-1, warmup_steps=4)
    with pytest.raises(ValueError, match="above warmup_steps"):
        learning_rate_factor(0, warmup_steps=4, schedule="cosine", total_steps=4)
