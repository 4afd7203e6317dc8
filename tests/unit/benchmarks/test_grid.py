"""Moshpit's grid: full grids give the exact mean, groups part evenly, and random groups have just enough cells."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import grid
from p2ptrain.averaging.grouping.cells import cell_of

LINEAGE = bytes(range(32))
group_sizes = st.integers(2, 256)
swarm_sizes = st.integers(1, 20_000)
small_shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
lineages = st.binary(min_size=32, max_size=32)


def names(count: int) -> list[str]:
    return [f"p{index}" for index in range(count)]


def chi_square(counts: Mapping[Any, int], num_cells: int) -> float:
    """The statistic against equal chances, cells that nobody is in included."""
    expected = sum(counts.values()) / num_cells
    return sum((count - expected) ** 2 for count in counts.values()) / expected + (num_cells - len(counts)) * expected


# Shapes


@settings(max_examples=500)
@given(swarm_sizes, group_sizes)
def test_a_shape_has_room_for_all_in_the_fewest_axes_with_even_sides_within_the_group_size(n: int, size: int) -> None:
    shape = grid.grid_shape(n, size)
    assert math.prod(shape) >= n
    assert max(shape) <= size
    assert size ** (len(shape) - 1) < n or len(shape) == 1
    assert max(shape) - min(shape) <= 1


@given(swarm_sizes, group_sizes)
def test_no_grid_with_sides_as_even_is_fuller(n: int, size: int) -> None:
    shape = grid.grid_shape(n, size)
    smaller = sorted(shape)
    smaller[-1] -= 1
    if max(smaller) - min(smaller) <= 1 and min(smaller) > 0:
        assert math.prod(smaller) < n


def test_all_swarms_up_to_20000_fit_and_grow_monotonically() -> None:
    for size in (2, 3, 7, 32, 64, 256):
        places = [math.prod(grid.grid_shape(n, size)) for n in range(1, 20_001)]
        assert all(room >= n for n, room in enumerate(places, start=1))
        axes = [len(grid.grid_shape(n, size)) for n in range(1, 20_001, 7)]
        assert axes == sorted(axes)
        for n in range(size + 1, 20_000, 7):
            if len(grid.grid_shape(n, size)) == len(grid.grid_shape(n + 1, size)):
                assert places[n - 1] <= places[n]


@pytest.mark.parametrize(
    ("n", "shape"), [(1, (1,)), (32, (32,)), (33, (6, 6)), (900, (30, 30)), (930, (31, 30)), (10_000, (22, 22, 21))]
)
def test_shapes_by_hand(n: int, shape: grid.Shape) -> None:
    assert grid.grid_shape(n, 32) == shape


@pytest.mark.parametrize(("n", "size"), [(0, 32), (-1, 32), (5, 0), (2, 1), (100, 1)])
def test_sizes_that_cannot_be_are_refused(n: int, size: int) -> None:
    for function in (
        grid.grid_shape,
        grid.cells_for,
    ):
        with pytest.raises(ValueError, match="cannot average in groups"):
            function(n, size)


# Groups of the grid


@given(small_shapes, st.data())
def test_all_that_share_all_but_one_coordinate_are_a_group_of_the_side(shape: grid.Shape, data: st.DataObject) -> None:
    axis = grid.axis_of(shape, data.draw(st.integers(0, 100)))
    groups = defaultdict(list)
    for place in itertools.product(*map(range, shape)):
        groups[grid.group_key(shape, axis, place)].append(place)
    assert all(len(members) == shape[axis] for members in groups.values())
    for members in groups.values():
        for other in set(range(len(shape))) - {axis}:
            assert len({place[other] for place in members}) == 1


@given(small_shapes, lineages, st.booleans(), st.integers(0, 3))
def test_a_full_grid_gives_everybody_the_exact_mean_and_stays_full(
    shape: grid.Shape, lineage: bytes, offsets: bool, start: int
) -> None:
    at = dict(zip(names(math.prod(shape)), itertools.product(*map(range, shape)), strict=True))
    values = {peer: Fraction(index**2 % 97, 7) for index, peer in enumerate(at)}
    mean = sum(values.values()) / len(values)
    for sub_round in range(start, start + len(shape)):
        axis = grid.axis_of(shape, sub_round)
        groups = defaultdict(list)
        for peer, place in at.items():
            groups[grid.group_key(shape, axis, place)].append(peer)
        for key, members in groups.items():
            assert len(members) == shape[axis]
            offset = grid.slot_offset(shape, lineage, 0, sub_round, key) if offsets else 0
            held = Fraction(sum(values[peer] for peer in members), len(members))
            for peer in members:
                values[peer] = held
                at[peer] = grid.next_coordinates(shape, axis, at[peer], members, peer, offset)
        assert len(set(at.values())) == len(at)
    assert set(values.values()) == {mean}


@given(st.integers(2, 12), st.integers(1, 30), st.integers(0, 11))
def test_members_of_a_group_part_evenly(side: int, count: int, offset: int) -> None:
    members = names(count)
    places = [grid.next_coordinates((3, side), 1, (2, 0), members, peer, offset % side) for peer in members]
    slots = Counter(slot for _, slot in places)
    assert {first for first, _ in places} == {2}
    assert max(slots.values()) - (min(slots.values()) if len(slots) == side else 0) <= 1


def test_groups_that_are_not_full_still_fill_the_next_ones_evenly() -> None:
    shape, members = (1000, 10), ["a", "b"]
    slots: Counter[int] = Counter()
    for row in range(1000):
        offset = grid.slot_offset(shape, LINEAGE, 0, 0, (1, row))
        slots.update(grid.next_coordinates(shape, 1, (row, 0), members, peer, offset)[1] for peer in members)
    assert set(slots) == set(range(10))
    assert chi_square(slots, 10) < 100  # The 1e-8 quantile with 9 degrees of freedom is 54; pairs double it.


def test_peers_start_all_over_the_grid() -> None:
    shape = (10, 10)
    at = Counter(grid.start_coordinates(shape, b"seed", peer) for peer in names(10_000))
    assert chi_square(at, 100) < 200  # The 1e-8 quantile with 99 degrees of freedom.
    assert grid.start_coordinates(shape, b"other", "p1") != grid.start_coordinates(shape, b"seed", "p1")


@pytest.mark.parametrize("shape", [(), (0,), (3, -1)])
def test_what_is_no_shape_is_refused(shape: grid.Shape) -> None:
    for function in (grid.capacity, lambda shape: grid.start_coordinates(shape, b"", "p")):
        with pytest.raises(ValueError, match="not the shape of a grid"):
            function(shape)


def test_places_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="no axis"):
        grid.group_key((3, 3), 2, (0, 0))
    for place in ((0, 3), (0, -1), (0,), (0, 0, 0)):
        with pytest.raises(ValueError, match="not a place"):
            grid.group_key((3, 3), 0, place)
    with pytest.raises(ValueError, match="no sub-round"):
        grid.axis_of((3, 3), -1)
    with pytest.raises(ValueError, match="did not average"):
        grid.next_coordinates((3, 3), 0, (0, 0), ["a"], "b")
    for key in ((), (0,), (0, 3), (2, 0)):
        with pytest.raises(ValueError, match=r"axis|not a place"):
            grid.slot_offset((3, 3), LINEAGE, 0, 0, key)


# Fixed or random


def test_order_pays_in_full_grids_and_random_groups_where_many_fail_or_groups_are_small() -> None:
    kinds = {rate: grid.choose_assignment((30, 30), 900, 32, rate).kind for rate in (0.0, 0.01, 0.1)}
    assert kinds == {0.0: "fixed", 0.01: "fixed", 0.1: "random"}
    assert grid.choose_assignment((32, 32), 400, 32, 0.0).kind == "random"
    assert grid.choose_assignment((10, 10), 100, 64, 0.0).kind == "random"
    assert grid.choose_assignment((20,), 20, 32, 1.0).kind == "fixed"
    assert "10.0% of the peers fail" in grid.choose_assignment((30, 30), 900, 32, 0.1).reason


@given(swarm_sizes, st.integers(2, 256), st.floats(0, 1), st.floats(0, 1))
def test_more_failures_never_turn_random_groups_into_fixed_ones(n: int, size: int, a: float, b: float) -> None:
    shape = grid.grid_shape(n, size)
    low, high = (grid.choose_assignment(shape, n, size, rate).kind for rate in sorted((a, b)))
    assert (low, high) != ("random", "fixed")


@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan])
def test_failure_rates_that_cannot_be_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="failure rate"):
        grid.choose_assignment((4, 4), 16, 4, rate)


# Cells of random groups


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 20))
def test_the_chance_of_an_overfull_cell_is_the_binomial_tail(n: int, num_cells: int, size: int) -> None:
    p = Fraction(1, num_cells)
    tail = sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(size + 1, n + 1))
    assert grid.cell_overflow(n, num_cells, size) == pytest.approx(float(tail), rel=1e-9, abs=1e-12)


@given(swarm_sizes, group_sizes, st.sampled_from([1e-6, 1e-3, grid.MIXING_TAIL]))
def test_there_are_just_enough_cells(n: int, size: int, tail: float) -> None:
    cells = grid.cells_for(n, size, tail)
    assert grid.cell_overflow(n, cells, size) <= tail
    assert cells == 1 or grid.cell_overflow(n, cells - 1, size) > tail
    assert grid.cells_for(n + 1, size, tail) >= cells


def test_cells_are_overfull_as_rarely_as_promised() -> None:
    cells, overfull = grid.cells_for(900, 16, 0.05), 0
    for round_ in range(20):
        counts = Counter(cell_of(LINEAGE, round_, 0, peer, cells) for peer in names(900))
        overfull += sum(count > 16 for count in counts.values())
    assert 0.02 < overfull / (20 * cells) <= 0.06


@pytest.mark.parametrize("tail", [0.0, 1.0, math.nan])
def test_chances_that_cannot_be_are_refused(tail: float) -> None:
    with pytest.raises(ValueError, match="not between 0 and 1"):
        grid.cells_for(100, 8, tail)


@pytest.mark.parametrize("numbers", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_counts_that_cannot_be_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="make no sense"):
        grid.cell_overflow(*numbers)


def test_the_grid_of_a_seed_is_always_the_same() -> None:
    assert grid.start_coordinates((32, 32), b"seed", "peer") == (2, 13)
    assert grid.slot_offset((32, 32), LINEAGE, 7, 1, (1, 5)) == 26
    assert [grid.cells_for(1000, size, 1e-3) for size in (8, 32, 64, 256)] == [407, 56, 24, 5]
