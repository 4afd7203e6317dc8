"""Which group a peer belongs to, as all holders of one head compute it: pure functions.

While the swarm fits in one group there is one cell. A larger swarm averages in a **tree with delegates**: on level 0
every peer averages in the cell that a hash of its id draws for this round. Then one delegate of each cell takes its
cell's mean, weighted by the cell's total, to a group of delegates, and so on until one group is left, whose result
everybody replays. It is exact after as many levels as `level_cells` has, however uneven the cells are, as long as one
delegate of each gets through.

Peers have ids, not indices, and no two need to know of the same peers. So a peer's cell depends on its own id and on
values that all holders of one head share (lineage, round, number of peers), never on whom the peer knows. Lineages
cannot be foreseen, so nobody can choose an id that meets a victim in a later round. How the tree compares with Moshpit
SGD's grid is measured by ``python -m benchmarks.bench_moshpit``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from typing import NamedTuple

from p2ptrain.averaging.protocol.certificate import Count, Head, Level, Present, Ticket
from p2ptrain.errors import IntegrityError
from p2ptrain.network.schema import Hash

MOST_LEFT_OUT = 0.02
"""Share of the peers for whom there is no room in a tree's cells, on average: their work waits a round. Cells in which
there is room for all nearly always would be 18 to 45 % full in groups of 4 to 16, and trees often a level deeper.
A second choice would let fewer wait; but a peer has one cell so that it counts once in a round, whatever it claims."""
MOST_FILL_PERCENT = 80
"""Large cells would be fuller than this: then a swarm that grew by a fifth since the last round would not fit in."""

_DECIMALS = Context(prec=50, Emin=-999_999_999, Emax=999_999_999)  # Rounds alike everywhere, which libm does not.


class Key(NamedTuple):
    """One group to be: a round of a lineage, and a cell of its tree.

    Attributes:
        round: The round in progress.
        lineage: That it extends.
        present: Peers that the lineage's head counts; says how many cells there are.
        level: Of the tree.
        cell: On that level.
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

    def check(self, key: Key) -> None:
        """Raise `IntegrityError` unless there is such a cell."""
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


def delegate_order(lineage: bytes, round_: int, sub_round: int, members: Iterable[str]) -> list[str]:
    """The members of a group in the order in which they are to stand for it; when one fails, the next takes its place.

    Differs from round to round, so that the work goes round too; among any two members the order is the same for all.
    """
    numbers = (round_, sub_round)
    return sorted(set(members), key=lambda peer: (_hash(b"delegate", numbers, lineage, peer), peer))


def cell_of(lineage: bytes, round_: int, level: int, peer: str, num_cells: int, choice: int = 0) -> int:
    """The cell, 0 to ``num_cells - 1``, in which a peer averages.

    Args:
        lineage: Of the head, 32 bytes.
        round_: The round in progress.
        level: The level of the tree.
        peer: Who.
        num_cells: How many there are; the same for all that hold the head.
        choice: 0 at first; 1 for the cell to go to when the first one is full, and so on.

    Raises:
        ValueError: A number is out of range.
    """
    if num_cells < 1:
        raise ValueError(f"there must be at least one cell, not {num_cells}")
    # Uniform but for 2**-64 or so.
    return int.from_bytes(_hash(b"cell", (round_, level, choice), lineage, peer)[:16], "big") * num_cells >> 128


def left_out(num_peers: int, num_cells: int, group_size: int) -> float:
    """The share of peers, on average, that come to a cell which has its ``group_size`` of those before them.

    ``c / n · E[max(0, X - g)]`` for X of ``num_peers`` that come to the cell with probability ``1 / num_cells`` each,
    where the expectation is ``n / c - g`` plus the sum of ``(g - k) p_k`` over the first g + 1 terms. It is right to 30
    digits after the point, and the same on every machine.

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
        terms = _binomial(num_peers, num_cells, group_size)
        room = sum((group_size - count) * term for count, term in enumerate(terms))
        return max(0.0, float(1 + (room - group_size) * num_cells / num_peers))


def _binomial(num_peers: int, num_cells: int, most: int) -> list[Decimal]:
    """The chances that a cell gets 0, 1, ... ``most`` peers, each from the one before, in the context that is set."""
    terms = [(1 - Decimal(1) / num_cells) ** num_peers]
    for count in range(most):
        terms.append(terms[-1] * (num_peers - count) / ((count + 1) * (num_cells - 1)))
    return terms


@lru_cache(maxsize=1024)
def tree_cells(num_peers: int, group_size: int) -> int:
    """The fewest cells of a tree's first level that leave out `MOST_LEFT_OUT` of the peers and are not too full.

    That makes 51 peers a cell for groups of 64, 12 for groups of 16, less than 5 for groups of 8 and 2 for groups of 4.

    Raises:
        ValueError: A number is out of range.
    """
    if num_peers < 1 or group_size < 1 or (group_size == 1 and num_peers > 1):
        raise ValueError(f"{num_peers} peers cannot average in groups of {group_size}: groups need two members to mix")
    if num_peers <= group_size:
        return 1
    least = -(-100 * num_peers // (MOST_FILL_PERCENT * group_size))
    return _fewest(least, lambda cells: left_out(num_peers, cells, group_size) <= MOST_LEFT_OUT)


def _fewest(least: int, suffices: Callable[[int], bool]) -> int:
    """The smallest number from ``least`` on that suffices, where all larger ones do."""
    too_few, enough = least - 1, least
    while not suffices(enough):
        too_few, enough = enough, 2 * enough
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if suffices(middle) else (middle, enough)
    return enough


def level_cells(num_peers: int, group_size: int) -> tuple[int, ...]:
    """The number of cells on each level of the tree, from the one where all peers average to the last, which has one.

    Only the first level is drawn (`cell_of`, `tree_cells`). Further up, the cells of the level before are known by
    number, whoever stands for them, so they are dealt out evenly (`parent_cell`).
    """
    cells = [tree_cells(num_peers, group_size)]
    while cells[-1] > 1:
        cells.append(-(-cells[-1] // group_size))
    return tuple(cells)


def parent_cell(cell: int, num_cells: int, num_parents: int) -> int:
    """The cell of the next level in which this one's delegate averages: contiguous cells, as evenly as can be.

    Raises:
        ValueError: There is no such cell, or the next level has more cells than this one.
    """
    if not 0 <= cell < num_cells or not 1 <= num_parents <= num_cells:
        raise ValueError(f"cell {cell} of {num_cells} has no parent among {num_parents}")
    return cell * num_parents // num_cells


def _hash(purpose: bytes, numbers: Iterable[int], shared: bytes, peer: str) -> bytes:
    """32 bytes for one decision. The id comes last: in a swarm, all that is before it is of one length a purpose."""
    try:
        encoded = b"".join(number.to_bytes(8, "big") for number in numbers)
    except OverflowError as error:
        raise ValueError("rounds, levels and choices are counted from 0, in 8 bytes") from error
    return hashlib.sha256(b"p2ptrain grid " + purpose + encoded + shared + peer.encode()).digest()
