"""The schedule is pure, warms up linearly, and ends where it says."""

from __future__ import annotations

import pytest

from p2ptrain.training.learning_rate import learning_rate_factor


def test_warm_up_is_linear_and_never_zero() -> None:
    assert [learning_rate_factor(step, warmup_steps=4) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate_factor(0, warmup_steps=0) == 1.0


def test_cosine_falls_from_one_to_its_end_and_stays() -> None:
    factors = [
        learning_rate_factor(step, warmup_steps=10, schedule="cosine", total_steps=110, final_factor=0.2)
        for step in range(10, 150)
    ]
    assert factors[0] == 1.0
    assert factors[50] == pytest.approx(0.6)
    assert factors == sorted(factors, reverse=True)
    assert factors[100:] == pytest.approx([0.2] * 40)


def test_impossible_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        learning_rate_factor(-1, warmup_steps=4)
    with pytest.raises(ValueError, match="above warmup_steps"):
        learning_rate_factor(0, warmup_steps=4, schedule="cosine", total_steps=4)
