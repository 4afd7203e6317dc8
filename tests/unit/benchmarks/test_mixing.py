"""The random groups that `bench_moshpit` mixes in have just enough cells."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.mixing import TAIL, cell_overflow, cells_for


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 20))
def test_the_chance_of_an_overfull_cell_is_the_binomial_tail(n: int, num_cells: int, size: int) -> None:
    p = Fraction(1, num_cells)
    tail = sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(size + 1, n + 1))
    assert cell_overflow(n, num_cells, size) == pytest.approx(float(tail), rel=1e-9, abs=1e-12)


@given(st.integers(1, 20_000), st.integers(2, 256))
def test_there_are_just_enough_cells(n: int, size: int) -> None:
    cells = cells_for(n, size)
    assert cell_overflow(n, cells, size) <= TAIL
    assert cells == 1 or cell_overflow(n, cells - 1, size) > TAIL
