"""Everybody is in one group a sub-round, full grids and trees give the exact mean, and odd sizes do no harm."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from p2ptrain.averaging.grouping import tree as grid

LINEAGE = bytes(range(32))
group_sizes = st.integers(2, 256)
swarm_sizes = st.integers(1, 20_000)
small_shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
lineages = st.binary(min_size=32, max_size=32)


def names(count: int) -> list[str]:
    return [f"p{index}" for index in range(count)]


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
    assert grid.sub_rounds(shape) == len(shape)


@given(st.lists(swarm_sizes, min_size=1, max_size=30), group_sizes)
def test_the_present_shape_always_has_room_and_is_full_enough(history: list[int], size: int) -> None:
    shape: grid.Shape = (1,)
    for n in history:
        shape = grid.next_shape(shape, n, size)
        assert math.prod(shape) >= n
        assert max(shape) <= size
        fresh = shape == grid.grid_shape(n, size)
        assert fresh or 100 * n >= grid.LEAST_FILL_PERCENT * math.prod(shape)


@given(st.integers(300, 20_000), st.lists(st.floats(0.75, 1.0), max_size=30), st.integers(16, 256))
def test_a_size_that_goes_up_and_down_does_not_change_the_shape(most: int, history: list[float], size: int) -> None:
    shape = grid.grid_shape(most, size)
    for part in history:
        assert grid.next_shape(shape, max(1, int(part * most)), size) == shape


@pytest.mark.parametrize(("n", "size"), [(0, 32), (-1, 32), (5, 0), (2, 1), (100, 1)])
def test_sizes_that_cannot_be_are_refused(n: int, size: int) -> None:
    for function in (
        grid.grid_shape,
        grid.cells_for,
        grid.tree_cells,
        grid.level_cells,
        lambda n, size: grid.next_shape((4,), n, size),
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
    for sub_round in range(start, start + grid.sub_rounds(shape)):
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
    for function in (grid.capacity, grid.sub_rounds, lambda shape: grid.start_coordinates(shape, b"", "p")):
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
    with pytest.raises(ValueError, match="counted from 0"):
        grid.slot_offset((3, 3), LINEAGE, -1, 0, (0, 1))


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


# Merging

group_maps = st.dictionaries(
    st.tuples(st.just(1), st.integers(0, 4), st.integers(0, 4)), st.integers(0, 6), max_size=12
)


@given(group_maps, st.integers(1, 4), st.integers(4, 8))
def test_merging_loses_nobody_overfills_nobody_and_leaves_nobody_that_could_move(
    sizes: dict[grid.GroupKey, int], least: int, size: int
) -> None:
    plan = grid.merge_plan(sizes, least, size)
    after: Counter[grid.GroupKey] = Counter()
    for key, count in sizes.items():
        after[grid.merge_target(key, sizes, least, size)] += count
    assert sum(after.values()) == sum(sizes.values())
    assert all(count <= max(size, sizes[key]) for key, count in after.items())
    assert not set(plan) & set(plan.values())
    assert all(sizes[key] < least for key in plan)
    alone = [key for key, count in after.items() if 0 < count < least]
    for first, second in itertools.combinations(alone, 2):
        assert after[first] + after[second] > size
    assert grid.merge_plan(dict(reversed(sizes.items())), least, size) == plan


@given(st.integers(0, 5), st.integers(0, 5))
def test_two_lonely_groups_meet_in_the_one_with_the_smaller_key(a: int, b: int) -> None:
    assume(a != b)
    sizes: dict[grid.GroupKey, int] = {(0, a): 1, (0, b): 1}
    assert {grid.merge_target(key, sizes, 2, 4) for key in sizes} == {(0, min(a, b))}


def test_a_lonely_group_goes_to_the_nearest_that_has_room() -> None:
    sizes: dict[grid.GroupKey, int] = {(0, 5, 5): 1, (0, 5, 6): 8, (0, 5, 2): 7, (0, 6, 6): 3}
    assert grid.merge_order((0, 5, 5), sizes) == [(0, 5, 6), (0, 5, 2), (0, 6, 6)]
    assert grid.merge_plan(sizes, 2, 8) == {(0, 5, 5): (0, 5, 2)}
    assert grid.merge_plan({(0, 1): 1, (0, 2): 8}, 2, 8) == {}
    assert grid.merge_plan({(0, 1): 1, (0, 2): 0}, 2, 8) == {}


def test_groups_that_cannot_merge_are_refused() -> None:
    for other in ((1, 2), (0, 2, 3), ()):
        with pytest.raises(ValueError, match="one sub-round"):
            grid.merge_order((0, 1), [other])
    for count, least, size in ((-1, 2, 8), (1, 0, 8), (1, 9, 8)):
        with pytest.raises(ValueError, match="cannot be made"):
            grid.merge_plan({(0, 1): count}, least, size)


# Cells and delegates


def chi_square(counts: Mapping[Any, int], num_cells: int) -> float:
    """The statistic against equal chances, cells that nobody is in included."""
    expected = sum(counts.values()) / num_cells
    return sum((count - expected) ** 2 for count in counts.values()) / expected + (num_cells - len(counts)) * expected


@pytest.mark.parametrize("round_", range(8))
def test_cells_are_balanced_and_drawn_anew_for_each_round_level_and_choice(round_: int) -> None:
    draws = {
        (level, choice): [grid.cell_of(LINEAGE, round_, level, peer, 50, choice) for peer in names(4000)]
        for level in range(2)
        for choice in range(2)
    }
    draws[2, 0] = [grid.cell_of(bytes(32), round_, 0, peer, 50) for peer in names(4000)]
    for cells in draws.values():
        assert set(cells) <= set(range(50))
        assert chi_square(Counter(cells), 50) < 130  # The 1e-8 quantile with 49 degrees of freedom is 128.
    for first, second in itertools.combinations(draws.values(), 2):
        same = sum(a == b for a, b in zip(first, second, strict=True))
        assert 30 < same < 140  # 80 on average if they are independent.


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 20))
def test_the_chance_of_an_overfull_cell_is_the_binomial_tail(n: int, num_cells: int, size: int) -> None:
    p = Fraction(1, num_cells)
    tail = sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(size + 1, n + 1))
    assert grid.cell_overflow(n, num_cells, size) == pytest.approx(float(tail), rel=1e-12, abs=1e-30)


@given(swarm_sizes, group_sizes, st.sampled_from([1e-6, 1e-3, grid.MIXING_TAIL]))
def test_there_are_just_enough_cells(n: int, size: int, tail: float) -> None:
    cells = grid.cells_for(n, size, tail)
    assert grid.cell_overflow(n, cells, size) <= tail
    assert cells == 1 or grid.cell_overflow(n, cells - 1, size) > tail
    assert grid.cells_for(n + 1, size, tail) >= cells


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 20))
def test_the_share_that_is_left_out_is_that_of_those_beyond_the_size_of_a_group(
    n: int, num_cells: int, size: int
) -> None:
    p = Fraction(1, num_cells)
    chances = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    beyond = sum(max(0, k - size) * chance for k, chance in enumerate(chances)) * num_cells / n
    assert grid.left_out(n, num_cells, size) == pytest.approx(float(beyond), rel=1e-12, abs=1e-30)


@given(swarm_sizes, group_sizes)
def test_a_tree_has_just_enough_cells(n: int, size: int) -> None:
    cells = grid.tree_cells(n, size)
    assert grid.left_out(n, cells, size) <= grid.MOST_LEFT_OUT
    assert cells == 1 or 100 * n <= grid.MOST_FILL_PERCENT * cells * size
    if cells > 1:
        too_full = 100 * n > grid.MOST_FILL_PERCENT * (cells - 1) * size
        assert too_full or grid.left_out(n, cells - 1, size) > grid.MOST_LEFT_OUT
    assert (cells == 1) == (n <= size)
    assert grid.tree_cells(n + 1, size) >= cells
    assert grid.left_out(n, cells + 1, size) <= grid.left_out(n, cells, size) + 1e-30, "more cells leave out no more"


@pytest.mark.parametrize(("n", "size"), [(24, 4), (100, 8), (512, 16), (2000, 64)])
def test_as_few_are_left_out_of_trees_as_promised(n: int, size: int) -> None:
    cells, peers, beyond, rounds = grid.tree_cells(n, size), names(n), 0, 12_000 // n
    for round_ in range(rounds):
        counts = Counter(grid.cell_of(LINEAGE, round_, 0, peer, cells) for peer in peers)
        beyond += sum(max(0, count - size) for count in counts.values())
    assert beyond / (rounds * n) < 1.5 * grid.MOST_LEFT_OUT


def test_cells_are_overfull_as_rarely_as_promised() -> None:
    cells, overfull = grid.cells_for(900, 16, 0.05), 0
    for round_ in range(20):
        counts = Counter(grid.cell_of(LINEAGE, round_, 0, peer, cells) for peer in names(900))
        overfull += sum(count > 16 for count in counts.values())
    assert 0.02 < overfull / (20 * cells) <= 0.06


@given(swarm_sizes, group_sizes)
def test_each_level_has_room_for_the_delegates_of_the_one_before(n: int, size: int) -> None:
    levels = grid.level_cells(n, size)
    assert levels[-1] == 1
    assert len(levels) == grid.num_levels(n, size)
    assert (len(levels) == 1) == (n <= size)
    for before, after in itertools.pairwise(levels):
        parents = [grid.parent_cell(cell, before, after) for cell in range(before)] if before < 3000 else []
        assert after < before
        assert parents == sorted(parents)
        assert max(Counter(parents).values(), default=0) <= size
        assert not parents or set(parents) == set(range(after))


@settings(max_examples=30)
@given(st.integers(1, 150), st.integers(4, 16), lineages, st.data())
def test_a_tree_gives_the_exact_weighted_mean_however_uneven_its_cells(
    n: int, size: int, lineage: bytes, data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.integers(1, 1000), min_size=n, max_size=n))
    peers = names(n)
    known = {peer: (Fraction(index**2 % 89, 3), weights[index]) for index, peer in enumerate(peers)}
    mean = sum(value * weight for value, weight in known.values()) / sum(weights)
    levels = grid.level_cells(n, size)
    groups = defaultdict(list)
    for peer in peers:
        groups[grid.cell_of(lineage, 3, 0, peer, levels[0])].append(peer)
    for level, num_cells in enumerate(levels, start=1):
        delegates: dict[int, str] = {}
        for cell, members in groups.items():
            total = sum(known[peer][1] for peer in members)
            held = Fraction(sum(known[peer][0] * known[peer][1] for peer in members), total)
            for peer in members:
                known[peer] = (held, total)
            delegates[cell] = grid.delegate_order(lineage, 3, level, members)[0]
        if level < len(levels):
            groups = defaultdict(list)
            for cell, delegate in delegates.items():
                groups[grid.parent_cell(cell, num_cells, levels[level])].append(delegate)
    (members,) = groups.values()
    assert {known[peer] for peer in members} == {(mean, sum(weights))}


@given(st.sets(st.text(max_size=5), max_size=8), st.text(max_size=5), lineages)
def test_all_agree_on_who_stands_first_whomever_else_they_know(known: set[str], other: str, lineage: bytes) -> None:
    order = grid.delegate_order(lineage, 1, 2, known)
    assert sorted(order) == sorted(known)
    assert [
        peer for peer in grid.delegate_order(lineage, 1, 2, [other, *order]) if peer != other or other in known
    ] == order


def test_standing_for_a_group_goes_round() -> None:
    first = Counter(grid.delegate_order(LINEAGE, round_, 0, names(5))[0] for round_ in range(1000))
    assert chi_square(first, 5) < 45  # The 1e-8 quantile with 4 degrees of freedom is 43.


def test_cells_and_chances_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one cell"):
        grid.cell_of(LINEAGE, 0, 0, "p", 0)
    with pytest.raises(ValueError, match="counted from 0"):
        grid.cell_of(LINEAGE, 0, -1, "p", 2)
    for numbers in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="make no sense"):
            grid.cell_overflow(*numbers)
        with pytest.raises(ValueError, match="make no sense"):
            grid.left_out(*numbers)
    for tail in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="not between 0 and 1"):
            grid.cells_for(100, 8, tail)
    for cell in ((-1, 3, 2), (3, 3, 2), (0, 3, 0), (0, 3, 4)):
        with pytest.raises(ValueError, match="no parent"):
            grid.parent_cell(*cell)


def test_what_is_drawn_is_the_same_for_every_version_that_can_meet() -> None:
    assert grid.start_coordinates((32, 32), b"seed", "peer") == (2, 13)
    assert [grid.cell_of(LINEAGE, 7, level, "peer", 1000) for level in range(3)] == [51, 584, 105]
    assert grid.slot_offset((32, 32), LINEAGE, 7, 1, (1, 5)) == 26
    assert grid.delegate_order(LINEAGE, 7, 1, names(6)) == ["p2", "p3", "p1", "p4", "p5", "p0"]
    assert [grid.cells_for(1000, size, 1e-3) for size in (8, 32, 64, 256)] == [407, 56, 24, 5]
    assert [grid.tree_cells(1000, size) for size in (4, 8, 16, 64)] == [620, 209, 84, 20]
