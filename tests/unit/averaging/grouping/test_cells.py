"""Which group a peer belongs to: the same for all, one at each level, and names from the wire are checked."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.averaging.grouping.cells import Cells, Key
from p2ptrain.averaging.protocol.head import Head
from p2ptrain.errors import IntegrityError

LINEAGE = b"l" * 32
NAMES = st.text(max_size=9)


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
        assert cells.check(list(key)) == key
    assert cells.num_cells(cells.key_of(place, peer, levels - 1)) == 1


def test_a_swarm_that_fits_in_a_group_has_one_cell() -> None:
    cells = Cells(8)
    assert {cells.key_of(head(3, present), f"p{i}") for present in (0, 1, 8) for i in range(20)} == {
        Key(3, LINEAGE, present) for present in (0, 1, 8)
    }


def test_cells_are_drawn_anew_in_each_round() -> None:
    cells, peers = Cells(8), [f"p{i}" for i in range(100)]
    drawn = [[cells.key_of(head(round_, 100), peer).cell for peer in peers] for round_ in (1, 2)]
    assert sum(a == b for a, b in zip(*drawn, strict=True)) < 20


@pytest.mark.parametrize(
    "values",
    [
        None, [], [1, LINEAGE, 0, 0], [1, LINEAGE, 0, 0, 0, 0], [-1, LINEAGE, 0, 0, 0], [1, b"short", 0, 0, 0],
        [1, LINEAGE, 1 << 40, 0, 0], [1, LINEAGE, 0, 1, 0], [1, LINEAGE, 0, 0, 1], [1, LINEAGE, 100, 0, 10**6],
        [1, LINEAGE, True, 0, 0], ["1", LINEAGE, 0, 0, 0], [1 << 70, LINEAGE, 0, 0, 0],
    ],
)  # fmt: skip
def test_names_of_groups_that_cannot_be_are_refused(values: Any) -> None:
    with pytest.raises(IntegrityError):
        Cells(8).check(values)
