"""Which group a peer belongs to, at which level of the tree, as all holders of one head compute it.

While the swarm fits in one group there is one level with one cell. Otherwise
`p2ptrain.averaging.grouping.tree.level_cells` says how many cells each level has: on level 0 every peer averages in the
cell that a hash of its id draws for this round; on the levels above, one delegate of each cell takes its cell's result
to a group of delegates.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from p2ptrain.averaging.grouping.tree import cell_of, level_cells, parent_cell
from p2ptrain.averaging.protocol.certificate import Ticket
from p2ptrain.averaging.protocol.head import DIGEST_BYTES, MAX_COUNT, MAX_PRESENT, Head
from p2ptrain.errors import IntegrityError


class Key(NamedTuple):
    """One group to be: a round of a lineage, and a cell of its tree.

    Attributes:
        round: The round in progress.
        lineage: That it extends.
        present: Peers that the lineage's head counts; says how many cells there are.
        level: Of the tree.
        cell: On that level.
    """

    round: int
    lineage: bytes
    present: int = 0
    level: int = 0
    cell: int = 0


class Cells:
    """The trees of a swarm whose groups have at most ``group_size`` members."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size

    def num_levels(self, present: int) -> int:
        """Levels of the tree of a swarm of so many peers; 1 while they fit in one group."""
        return len(_num_cells(present, self._group_size))

    def num_cells(self, key: Key) -> int:
        """Cells on the key's level."""
        return _num_cells(key.present, self._group_size)[key.level]

    def key_of(self, place: Head | Ticket | Key, peer: str, level: int = 0) -> Key:
        """The group in which a peer, or what it stands for, averages after a head, or in a ticket's or key's round."""
        cell = _cell(place.round, place.lineage, place.present, self._group_size, level, peer)
        return Key(place.round, place.lineage, place.present, level, cell)

    def includes(self, key: Key, peer: str) -> bool:
        """Whether a peer, or what it would stand for, belongs to this group."""
        return _cell(key.round, key.lineage, key.present, self._group_size, key.level, peer) == key.cell

    def slot(self, key: Key, peer: str) -> str:
        """For whom a member of this group speaks: itself on level 0, above that its cell on the level below."""
        if not key.level:
            return peer
        return f"cell {_cell(key.round, key.lineage, key.present, self._group_size, key.level - 1, peer)}"

    def check(self, values: Any) -> Key:
        """A key that came over the wire.

        Raises:
            IntegrityError: It is malformed, or there is no such cell.
        """
        if not (isinstance(values, list) and len(values) == 5):
            raise IntegrityError("a malformed name of a group")
        round_, lineage, present, level, cell = values
        numbers = all(type(number) is int and number >= 0 for number in (round_, present, level, cell))
        if not (numbers and type(lineage) is bytes and len(lineage) == DIGEST_BYTES and round_ < MAX_COUNT):
            raise IntegrityError("a malformed name of a group")
        if present > MAX_PRESENT or level >= self.num_levels(present):
            raise IntegrityError("a group that no tree has")
        key = Key(round_, lineage, present, level, cell)
        if cell >= self.num_cells(key):
            raise IntegrityError("a group that no tree has")
        return key


@lru_cache(maxsize=1024)
def _num_cells(present: int, group_size: int) -> tuple[int, ...]:
    return (1,) if present <= group_size or group_size < 2 else level_cells(present, group_size)


@lru_cache(maxsize=1 << 15)
def _cell(round_: int, lineage: bytes, present: int, group_size: int, level: int, peer: str) -> int:
    cells = _num_cells(present, group_size)
    if level == 0:
        return cell_of(lineage, round_, 0, peer, cells[0]) if cells[0] > 1 else 0
    below = _cell(round_, lineage, present, group_size, level - 1, peer)
    return parent_cell(below, cells[level - 1], cells[level])
