"""Elementary functions are right in double precision, and have golden bits."""

import hashlib
import math

import numpy as np

from p2ptrain.models.exact.elementary import exp, log, sine_cosine

RNG = np.random.default_rng(0)
EXPONENTS = np.concatenate([RNG.uniform(-700, 100, 20_000), [0.0, -0.0, 1.0, -700.0]])
POSITIVE = np.concatenate([np.exp2(RNG.uniform(-60, 60, 20_000)), RNG.uniform(0.9, 1.1, 20_000), [1.0, 0.5, 2.0]])
ANGLES = np.concatenate([RNG.uniform(0, 2**20, 20_000), RNG.uniform(0, 7, 20_000), [0.0]])


def test_errors_are_below_1e15() -> None:
    np.testing.assert_allclose(exp(EXPONENTS), np.exp(EXPONENTS), rtol=1e-15, atol=0)
    np.testing.assert_allclose(log(POSITIVE), np.log(POSITIVE), rtol=1e-15, atol=1e-300)
    for found, expected in zip(sine_cosine(ANGLES), (np.sin(ANGLES), np.cos(ANGLES)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-15)


def test_small_numbers_end_at_0_and_simple_values_are_exact() -> None:
    assert exp(np.array([-701.0, -1e300, -math.inf, 0.0])).tolist() == [0.0, 0.0, 0.0, 1.0]
    assert log(np.array([1.0])).tolist() == [0.0]
    assert [each.tolist() for each in sine_cosine(np.zeros(1))] == [[0.0], [1.0]]


def test_bits_are_golden() -> None:
    numbers = np.arange(1, 5001) / 7.0
    found = hashlib.sha256()
    for values in (exp(-numbers), log(numbers), *sine_cosine(numbers)):
        found.update(values.tobytes())
    assert found.hexdigest() == "17270fe526e85a4f0be25b1f03a51982271b2a85ca93c34d20d2a02940aa16b0"
