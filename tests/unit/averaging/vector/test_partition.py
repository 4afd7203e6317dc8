"""Shares cover the vector, follow bandwidth, and are as fast as a linear program's."""

import importlib
import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from p2ptrain.averaging.allreduce.bandwidth import share_weights, split_shares

bandwidth_lists = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-3, 1e9), st.sampled_from([1.0, 10.0, 100.0])), min_size=1, max_size=12
).filter(any)


def slowest(weights: list[float], bandwidths: list[float]) -> float:
    n = len(weights)
    return max((1 + (n - 2) * w) / b for w, b in zip(weights, bandwidths, strict=True) if b > 0)


@given(st.integers(0, 100_000), bandwidth_lists, st.sampled_from([1, 7, 256, 4096]))
def test_shares_cover_the_vector_once_in_order_at_block_boundaries(
    num_values: int, bandwidths: list[float], block_size: int
) -> None:
    shares = split_shares(num_values, share_weights(bandwidths), block_size)
    assert [start for start, _ in shares] == [0, *(stop for _, stop in shares[:-1])]
    assert shares[-1][1] == num_values
    for (start, stop), bandwidth in zip(shares, bandwidths, strict=True):
        assert start <= stop
        assert start == stop or start % block_size == 0
        assert start == stop or bandwidth > 0, "members without bandwidth own nothing"


@given(st.integers(0, 100_000), bandwidth_lists, st.sampled_from([1, 256]))
def test_a_larger_weight_never_means_fewer_blocks(num_values: int, bandwidths: list[float], block_size: int) -> None:
    weights = share_weights(bandwidths)
    shares = split_shares(num_values, weights, block_size)
    blocks = [-(-(stop - start) // block_size) for start, stop in shares]
    ranked = sorted(zip(weights, blocks, strict=True))
    for (light, fewer), (heavy, more) in pairwise(ranked):
        assert light == heavy or fewer <= more


@settings(max_examples=60)
@given(st.lists(st.one_of(st.just(0.0), st.floats(0.5, 100.0)), min_size=3, max_size=10).filter(any))
def test_no_split_is_faster_than_the_linear_programs(bandwidths: list[float]) -> None:
    n = len(bandwidths)
    # Variables w_1..w_n, T. Minimise T subject to (n-2) w_i - b_i T <= -1 for owners, sum w = 1, w_i = 0 if b_i = 0.
    rows = [i for i, b in enumerate(bandwidths) if b > 0]
    upper = np.zeros((len(rows), n + 1))
    for row, i in enumerate(rows):
        upper[row, i], upper[row, n] = n - 2, -bandwidths[i]
    solution = importlib.import_module("scipy.optimize").linprog(
        [0.0] * n + [1.0],
        A_ub=upper,
        b_ub=-np.ones(len(rows)),
        A_eq=[[1.0] * n + [0.0]],
        b_eq=[1.0],
        bounds=[(0, None if b > 0 else 0) for b in bandwidths] + [(0, None)],
    )
    assert solution.success
    ours = slowest([float(w) for w in share_weights(bandwidths)], bandwidths)
    assert ours == pytest.approx(solution.fun, rel=1e-6)


@given(bandwidth_lists, st.integers(1, 1_000_000))
def test_whole_blocks_stay_within_one_of_the_exact_fraction(bandwidths: list[float], num_blocks: int) -> None:
    weights = share_weights(bandwidths)
    for (start, stop), weight in zip(split_shares(num_blocks, weights, 1), weights, strict=True):
        assert abs(stop - start - weight * num_blocks) < 1


@given(bandwidth_lists, st.integers(-30, 30))
def test_the_unit_of_bandwidth_does_not_matter(bandwidths: list[float], exponent: int) -> None:
    scaled = [math.ldexp(b, exponent) for b in bandwidths]
    assume(all((s > 0) == (b > 0) for s, b in zip(scaled, bandwidths, strict=True)))
    assert share_weights(scaled) == share_weights(bandwidths)


@pytest.mark.parametrize(
    ("bandwidths", "weights"), [([3.0], [1]), ([0.0, 5.0], [0, 1]), ([3.0, 5.0], [Fraction(1, 2), Fraction(1, 2)])]
)
def test_the_owners_of_a_group_of_one_or_two_get_equal_shares(bandwidths: list[float], weights: list[Fraction]) -> None:
    assert share_weights(bandwidths) == weights


@pytest.mark.parametrize("bandwidths", [[], [0.0, 0.0], [1.0, -1.0], [1.0, math.nan], [math.inf, 1.0]])
def test_bandwidths_that_make_no_sense_are_refused(bandwidths: list[float]) -> None:
    with pytest.raises(ValueError, match="bandwidth"):
        share_weights(bandwidths)


@pytest.mark.parametrize(
    ("num_values", "weights", "block_size", "refusal"),
    [
        (-1, [Fraction(1)], 1, "cannot cut"),
        (10, [Fraction(1)], 0, "cannot cut"),
        (100, [Fraction(1, 2)], 10, "sum to exactly 1"),
        (100, [Fraction(3, 2), Fraction(-1, 2)], 10, "sum to exactly 1"),
    ],
)
def test_sizes_out_of_range_and_weights_that_are_no_split_are_refused(
    num_values: int, weights: list[Fraction], block_size: int, refusal: str
) -> None:
    with pytest.raises(ValueError, match=refusal):
        split_shares(num_values, weights, block_size)
