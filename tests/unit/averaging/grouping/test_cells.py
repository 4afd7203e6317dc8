"""Every peer has one cell of each level, cells fit their groups, and trees give the exact mean however uneven."""

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.averaging.grouping.cells import (
    LEAST_PEERS,
    MOST_FILL_PERCENT,
    MOST_LEFT_OUT,
    Cells,
    Key,
    cell_of,
    delegate_order,
    left_out,
    level_cells,
    parent_cell,
    tree_cells,
)  # fmt: skip
from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.averaging.protocol.table import founding_table
from p2ptrain.errors import IntegrityError
from tests.unit.averaging.protocol.test_table import make_body

LINEAGE = bytes(range(32))
group_sizes = st.integers(2, 256)
swarm_sizes = st.integers(1, 20_000)
lineages = st.binary(min_size=32, max_size=32)


def names(count: int) -> list[str]:
    return [f"p{index}" for index in range(count)]


def chi_square(counts: Mapping[Any, int], num_cells: int) -> float:
    """The statistic against equal chances, cells that nobody is in included."""
    expected = sum(counts.values()) / num_cells
    return sum((count - expected) ** 2 for count in counts.values()) / expected + (num_cells - len(counts)) * expected


@pytest.mark.parametrize("round_", range(8))
def test_cells_are_balanced_and_drawn_anew_for_each_round_level_and_choice(round_: int) -> None:
    draws = [[cell_of(LINEAGE, round_, level, peer, 50) for peer in names(4000)] for level in range(3)]
    draws.append([cell_of(bytes(32), round_, 0, peer, 50) for peer in names(4000)])
    for cells in draws:
        assert set(cells) <= set(range(50))
        assert chi_square(Counter(cells), 50) < 130  # The 1e-8 quantile with 49 degrees of freedom is 128.
    for first, second in itertools.combinations(draws, 2):
        same = sum(a == b for a, b in zip(first, second, strict=True))
        assert 30 < same < 140  # 80 on average if they are independent.


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 20))
def test_the_share_that_is_left_out_is_that_of_those_beyond_the_size_of_a_group(
    n: int, num_cells: int, size: int
) -> None:
    p = Fraction(1, num_cells)
    chances = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    beyond = sum(max(0, k - size) * chance for k, chance in enumerate(chances)) * num_cells / n
    assert left_out(n, num_cells, size) == pytest.approx(float(beyond), rel=1e-12, abs=1e-30)


@given(swarm_sizes, group_sizes)
def test_a_tree_has_just_enough_cells(n: int, size: int) -> None:
    cells = tree_cells(n, size)
    assert left_out(n, cells, size) <= MOST_LEFT_OUT
    assert cells == 1 or 100 * n <= MOST_FILL_PERCENT * cells * size
    for_delegates = min(n // LEAST_PEERS, size)
    assert cells == 1 or cells >= for_delegates
    if cells > max(1, for_delegates):
        too_full = 100 * n > MOST_FILL_PERCENT * (cells - 1) * size
        assert too_full or left_out(n, cells - 1, size) > MOST_LEFT_OUT
    assert (cells == 1) == (n <= size)
    assert tree_cells(n + 1, size) >= cells
    assert left_out(n, cells + 1, size) <= left_out(n, cells, size) + 1e-30, "more cells leave out no more"


@given(swarm_sizes, group_sizes)
def test_each_level_has_room_for_the_delegates_of_the_one_before(n: int, size: int) -> None:
    levels = level_cells(n, size)
    assert levels[-1] == 1
    assert (len(levels) == 1) == (n <= size)
    for before, after in itertools.pairwise(levels):
        parents = [parent_cell(cell, before, after) for cell in range(before)] if before < 3000 else []
        assert after < before
        assert parents == sorted(parents)
        assert max(Counter(parents).values(), default=0) <= size
        assert not parents or set(parents) == set(range(after))
    assert len(levels) < 3 or 2 * levels[-2] > size, "the last group is the large one"
    assert len(levels) == 1 or levels[-2] >= min(n // LEAST_PEERS, size // 2)


def hostile_majority(num_peers: int, delegates: int) -> float:
    """The probability that of delegates drawn from so many peers, a fifth of them hostile, most are hostile."""
    hostile = num_peers // 5
    ways = (
        math.comb(hostile, bad) * math.comb(num_peers - hostile, delegates - bad)
        for bad in range(delegates // 2 + 1, delegates + 1)
    )
    return float(Fraction(sum(ways), math.comb(num_peers, delegates)))


@pytest.mark.parametrize(
    ("num_peers", "delegates", "chance"),
    [(100, 12, 2.0e-3), (200, 25, 1.2e-4), (500, 62, 1.8e-9), (4000, 40, 4.4e-6), (10_000, 49, 1.2e-6)],
)
def test_of_the_last_group_most_are_seldom_hostile(num_peers: int, delegates: int, chance: float) -> None:
    """As docs/explanation/security.md says, for groups of 64."""
    assert level_cells(num_peers, 64)[-2] == delegates
    assert hostile_majority(num_peers, delegates) == pytest.approx(chance, rel=0.05)
    assert hostile_majority(num_peers, 4) > 0.02


@given(st.sets(st.text(max_size=5), max_size=8), st.text(max_size=5), lineages)
def test_all_agree_on_who_stands_first_whomever_else_they_know(known: set[str], other: str, lineage: bytes) -> None:
    order = delegate_order(lineage, 1, 2, known)
    assert sorted(order) == sorted(known)
    assert [peer for peer in delegate_order(lineage, 1, 2, [other, *order]) if peer != other or other in known] == order


@given(st.sets(st.text(max_size=5), max_size=8), st.sets(st.text(max_size=5), max_size=8), lineages)
def test_voters_stand_before_others_and_each_kind_in_the_order_of_all(
    members: set[str], voters: set[str], lineage: bytes
) -> None:
    voters.update(sorted(members)[::2])
    drawn, order = delegate_order(lineage, 1, 2, members), delegate_order(lineage, 1, 2, members, voters)
    assert order == [peer for peer in drawn if peer in voters] + [peer for peer in drawn if peer not in voters]


def test_standing_for_a_group_goes_round() -> None:
    first = Counter(delegate_order(LINEAGE, round_, 0, names(5))[0] for round_ in range(1000))
    assert chi_square(first, 5) < 45  # The 1e-8 quantile with 4 degrees of freedom is 43.


def test_what_is_drawn_is_the_same_for_every_version_that_can_meet() -> None:
    assert [cell_of(LINEAGE, 7, level, "peer", 1000) for level in range(3)] == [51, 584, 105]
    assert delegate_order(LINEAGE, 7, 1, names(6)) == ["p2", "p3", "p1", "p4", "p5", "p0"]
    assert [tree_cells(1000, size) for size in (4, 8, 16, 64)] == [620, 209, 84, 64]


@pytest.mark.parametrize(("num_peers", "size", "rounds"), [(1000, 64, 5), (512, 16, 11), (64, 8, 8)])
def test_a_crowd_that_comes_at_once_is_in_within_a_few_rounds(num_peers: int, size: int, rounds: int) -> None:
    table, present, cells = founding_table(["seed"]), 0, Cells(size)
    for round_ in range(rounds):
        groups: dict[int, list[str]] = {}
        for peer in names(num_peers):
            groups.setdefault(cells.key_of(head(round_, present), peer).cell, []).append(peer)
        roster = [peer for cell in groups.values() for peer in table.group_of(cell, size, 1)]
        body = make_body(table, round_, roster)
        assert not table.leaves_out_most(body.census), "no voter would sign"
        table, present = table.after(body), body.present
    assert present == num_peers


# The cells of a swarm


def head(round_: int, present: int) -> Head:
    return Head(round_, LINEAGE, 0, 0, b"d" * 32, present=present)


@settings(max_examples=60)
@given(
    present=st.integers(0, 400), group_size=st.integers(2, 64), round_=st.integers(0, 1000), peer=st.text(max_size=9)
)
def test_a_peer_is_in_one_cell_of_each_level_and_below_it_in_the_one_it_speaks_for(
    present: int, group_size: int, round_: int, peer: str
) -> None:
    cells, place = Cells(group_size), head(round_, present)
    levels = cells.num_levels(present)
    for level in range(levels):
        key = cells.key_of(place, peer, level)
        others = [key._replace(cell=cell) for cell in range(cells.num_cells(key))]
        assert [other for other in others if cells.includes(other, peer)] == [key]
        below = cells.key_of(place, peer, level - 1).cell if level else None
        assert cells.slot(key, peer) == (peer if below is None else f"cell {below}")
        cells.check(key)
    assert cells.num_cells(cells.key_of(place, peer, levels - 1)) == 1


@pytest.mark.parametrize(("present", "level", "cell"), [(0, 1, 0), (0, 0, 1), (100, 0, 10**6), (1 << 16, 15, 0)])
def test_groups_that_no_tree_has_are_refused(present: int, level: int, cell: int) -> None:
    with pytest.raises(IntegrityError, match="no tree"):
        Cells(8).check(Key(1, LINEAGE, present, level, cell))


def test_cells_are_drawn_anew_in_each_round() -> None:
    cells, peers = Cells(8), names(100)
    drawn = [[cells.key_of(head(round_, 100), peer).cell for peer in peers] for round_ in (1, 2)]
    assert sum(a == b for a, b in zip(*drawn, strict=True)) < 20
