"""The cell of the tree in which a peer averages, as all holders of one head compute it: pure functions.

A swarm that fits in one group has one cell. A larger one averages in a **tree with delegates**: one delegate of each
cell takes the cell's weighted mean to a group of delegates, up to the last group, whose result all peers replay.

A cell depends on the peer's id and on the head's lineage, round and number of peers, not on the peers that one knows.
The head's number of peers follows from the member table.
Lineages are unpredictable: no peer can choose an id that meets a victim in a later round.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Container, Iterable
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from typing import NamedTuple

from p2ptrain.averaging.protocol.certificate import Count, Head, Level, Present, Roster, Ticket
from p2ptrain.errors import IntegrityError
from p2ptrain.network.schema import Hash

MOST_LEFT_OUT = 0.02
"""Maximum average fraction of peers without room in their cells; their work waits a round. Room for nearly all would
need cells that are 18 to 45 % full, and often one more level. A peer has one cell, so it counts once in a round."""
MOST_FILL_PERCENT = 80
"""Maximum average fill of large cells, so that they have room for a swarm that grew by a fifth since the last round."""
LEAST_PEERS = 8
"""Minimum average number of peers in a cell that could be larger: the rest of them makes more cells, up to one group of
delegates. Of a few delegates, most are easily hostile."""

_DECIMALS = Context(prec=50, Emin=-999_999_999, Emax=999_999_999)  # unlike libm, it rounds alike on all machines


class Key(NamedTuple):
    """Identifies a group: a round of a lineage, and a cell of its tree.

    ``present`` is the number of peers that the lineage's head counts; it determines the number of cells.
    """

    round: Count
    lineage: Hash
    present: Present = 0
    level: Level = 0
    cell: Present = 0


class Cells:
    """The trees of a swarm whose groups have at most ``group_size`` members."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size

    def num_levels(self, present: int) -> int:
        """Return the number of levels of the tree of ``present`` peers; 1 if they fit in one group."""
        return len(_num_cells(present, self._group_size))

    def num_cells(self, key: Key) -> int:
        return _num_cells(key.present, self._group_size)[key.level]

    def key_of(self, round_: Head | Ticket | Key, peer: str, level: int = 0) -> Key:
        """Return the group of a level in which a peer or its result averages: after a head, or in a ticket's round."""
        cell = _cell(round_.round, round_.lineage, round_.present, self._group_size, level, peer)
        return Key(round_.round, round_.lineage, round_.present, level, cell)

    def includes(self, key: Key, peer: str) -> bool:
        """True if a peer, or the result that it would bring, belongs to this group."""
        return self.key_of(key, peer, key.level) == key

    def slot(self, key: Key, peer: str) -> str:
        """Return the unit that a member represents: itself on level 0, its cell of the level below otherwise."""
        if not key.level:
            return peer
        return f"cell {self.key_of(key, peer, key.level - 1).cell}"

    def is_consistent(self, roster: Roster) -> bool:
        """True if the tickets of a roster belong to one group, and are in the order of the peers' ids."""
        first = roster.tickets[0]
        key = self.key_of(first, first.peer, first.level)
        slots = {self.slot(key, peer) for peer in roster.members}
        agreed = {(t.digest, t.layout, self.key_of(t, t.peer, t.level)) for t in roster.tickets}
        ordered = list(roster.members) == sorted(set(roster.members))
        return agreed == {(first.digest, first.layout, key)} and ordered and len(slots) == len(roster.tickets)

    def check(self, key: Key) -> None:
        """Raise `IntegrityError` unless the tree has this cell."""
        if key.level >= self.num_levels(key.present) or key.cell >= self.num_cells(key):
            raise IntegrityError("a group that no tree has")


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


def delegate_order(
    lineage: bytes, round_: int, sub_round: int, members: Iterable[str], voters: Container[str] = ()
) -> list[str]:
    """Return the members of a group in the order in which they become its delegate; it differs in each round.

    The lineage's voters come before the others. The order of any two members does not depend on the others.
    """
    numbers = (round_, sub_round)
    return sorted(set(members), key=lambda peer: (peer not in voters, _hash(b"delegate", numbers, lineage, peer), peer))


def cell_of(lineage: bytes, round_: int, level: int, peer: str, num_cells: int) -> int:
    """Return the cell, 0 to ``num_cells - 1``, that a hash draws for a peer.

    Raises:
        ValueError: A number is out of range.
    """
    if num_cells < 1:
        raise ValueError(f"there must be at least one cell, not {num_cells}")
    # Uniform up to about 2**-64.
    return int.from_bytes(_hash(b"cell", (round_, level, 0), lineage, peer)[:16], "big") * num_cells >> 128


def left_out(num_peers: int, num_cells: int, group_size: int) -> float:
    """Return the average fraction of peers whose cell is full before they come.

    It is ``c / n · E[max(0, X - g)]``, where X of n peers come to a cell with probability ``1 / c`` each. The
    expectation is ``n / c - g`` plus the sum of ``(g - k) p_k`` over the first g + 1 terms. The result is exact to 30
    decimal places, and equal on every machine.

    Raises:
        ValueError: A number is not positive.
    """
    if min(num_peers, num_cells, group_size) < 1:
        raise ValueError(f"{num_peers} peers in {num_cells} cells of {group_size} make no sense")
    if num_peers <= group_size:
        return 0.0
    if num_cells == 1:
        return 1 - group_size / num_peers
    with localcontext(_DECIMALS):
        room, term = Decimal(0), (1 - Decimal(1) / num_cells) ** num_peers  # the probability that a cell gets no peer
        for count in range(group_size):
            room += (group_size - count) * term
            term = term * (num_peers - count) / ((count + 1) * (num_cells - 1))
        return max(0.0, float(1 + (room - group_size) * num_cells / num_peers))


@lru_cache(maxsize=1024)
def tree_cells(num_peers: int, group_size: int) -> int:
    """Return the number of cells on a tree's first level: the least within `MOST_LEFT_OUT` and `MOST_FILL_PERCENT`.

    There are more if that is not enough for a group of delegates, unless cells would have fewer than `LEAST_PEERS`. A
    cell has at most 51 peers for groups of 64, 12 for groups of 16, 5 for groups of 8, and 2 for groups of 4.

    Raises:
        ValueError: A number is out of range.
    """
    if num_peers < 1 or group_size < 1 or (group_size == 1 and num_peers > 1):
        raise ValueError(f"{num_peers} peers cannot average in groups of {group_size}: groups need two members to mix")
    if num_peers <= group_size:
        return 1
    least = most = -(-100 * num_peers // (MOST_FILL_PERCENT * group_size))
    while left_out(num_peers, most, group_size) > MOST_LEFT_OUT:
        least, most = most + 1, 2 * most
    fewest = bisect_left(
        range(most), True, lo=least, key=lambda cells: left_out(num_peers, cells, group_size) <= MOST_LEFT_OUT
    )
    return max(fewest, min(num_peers // LEAST_PEERS, group_size))


def level_cells(num_peers: int, group_size: int) -> tuple[int, ...]:
    """Return the number of cells on each level of the tree, from level 0 to the last, which has one.

    A hash draws the cells of level 0 (`cell_of`, `tree_cells`). Above, cells are assigned evenly (`parent_cell`). The
    levels are as few as possible, and the last groups the largest: the last one has more than half of ``group_size``
    delegates if the level below has as many cells. A few hostile delegates are a majority of a small last group.
    """
    cells = [tree_cells(num_peers, group_size)]
    while cells[-1] > 1:
        room = 1  # for results in the levels above the next one
        while room * group_size < cells[-1]:
            room *= group_size
        cells.append(-(-cells[-1] // -(-cells[-1] // room)))
    return tuple(cells)


def parent_cell(cell: int, num_cells: int, num_parents: int) -> int:
    """Return the cell of the next level for a cell's delegate: contiguous cells share one, as evenly as possible.

    Raises:
        ValueError: The cell does not exist, or the next level has more cells than this one.
    """
    if not 0 <= cell < num_cells or not 1 <= num_parents <= num_cells:
        raise ValueError(f"cell {cell} of {num_cells} has no parent among {num_parents}")
    return cell * num_parents // num_cells


def _hash(purpose: bytes, numbers: Iterable[int], shared: bytes, peer: str) -> bytes:
    """Return 32 bytes for one decision; the id comes last, because all fields before it have a fixed length."""
    try:
        encoded = b"".join(number.to_bytes(8, "big") for number in numbers)
    except OverflowError as error:
        raise ValueError("rounds, levels and choices are counted from 0, in 8 bytes") from error
    return hashlib.sha256(b"p2ptrain grid " + purpose + encoded + shared + peer.encode()).digest()
