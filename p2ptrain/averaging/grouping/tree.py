"""Who averages with whom in a swarm larger than one group: pure functions of what all share at one head.

Two ways, both in *sub-rounds*, in each of which a peer averages with one group.

* **Mixing**, as in Moshpit SGD (Ryabinin et al., section 3.2, https://arxiv.org/abs/2103.03239): peers meet others in
  every sub-round, and come closer by a constant factor. What a peer holds is not lost when it fails: others hold as
  much. With *fixed* coordinates (`start_coordinates`, `next_coordinates`) those in a d-dimensional grid that share all
  but one are a group, and that one rotates; if each place has one peer and nobody fails, everybody holds the exact
  mean after d sub-rounds. *Random* groups (`cell_of` with `cells_for(..., MIXING_TAIL)`) are drawn anew each time and
  need no memory. `choose_assignment` says which.
* A **tree with delegates**: in sub-round 0 every cell averages; then one delegate of each cell takes its cell's mean,
  weighted by the cell's total, to a group of delegates, and so on until one group is left, whose result everybody
  replays. Exact after `num_levels` sub-rounds however uneven the cells are, as long as somebody of each gets through.

Peers have ids, not indices, and no two need to know of the same peers. So what a peer computes for itself depends on
its own id and on what is the same for all that hold one head (lineage, round, shape or number of cells), never on whom
it knows. Lineages cannot be foreseen, so nobody can choose an id that meets a victim in a later round. How well each
way mixes is measured by ``python -m benchmarks.bench_moshpit``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from typing import Literal

Shape = tuple[int, ...]
"""The grid's side lengths, one for each axis."""
Coordinates = tuple[int, ...]
"""A peer's place in the grid, one for each axis; not necessarily its alone."""
GroupKey = tuple[int, ...]
"""The axis, then the coordinates on all other axes, in order."""

LEAST_FILL_PERCENT = 60
"""A shape is kept while this much of it is occupied: below, a new one saves more than one sub-round in six."""
MIXING_TAIL = 0.25
"""How likely a cell of random groups that mix may get more peers than fit in a group; some then make a second try."""
MOST_LEFT_OUT = 0.02
"""Share of the peers for whom there is no room in a tree's cells, on average: their work waits a round. Cells in which
there is room for all nearly always would be 18 to 45 % full in groups of 4 to 16, and trees often a level deeper.
A second choice would let fewer wait; but a peer has one cell so that it counts once in a round, whatever it claims."""
MOST_FILL_PERCENT = 80
"""Large cells would be fuller than this: then a swarm that grew by a fifth since the last round would not fit in."""
FIXED_FROM, FIXED_SLOPE = 0.5, 0.1
"""From the benchmark's sweep: fixed coordinates need fewer sub-rounds while the failure rate is within the slope times
(q - from), where q is the size of their groups divided by that of random ones. With two axes a little longer."""

_DECIMALS = Context(prec=50, Emin=-999_999_999, Emax=999_999_999)  # Rounds alike everywhere, which libm does not.


def grid_shape(num_peers: int, group_size: int) -> Shape:
    """The grid for so many peers: the fewest axes, sides that differ by at most one, and then the fewest places.

    All sides are within ``group_size``, and over ``s / (s + 1)`` of the grid is occupied if s is its shortest side.

    Raises:
        ValueError: A number is not positive, or groups of one are to mix.
    """
    _check_sizes(num_peers, group_size)
    if num_peers <= group_size:
        return (num_peers,)
    num_axes = 2
    while group_size**num_axes < num_peers:
        num_axes += 1
    side = round(num_peers ** (1 / num_axes))  # A guess that the next two lines correct: powers differ among libms.
    while side**num_axes > num_peers:
        side -= 1
    while (side + 1) ** num_axes <= num_peers:
        side += 1
    longer = 0
    while (side + 1) ** longer * side ** (num_axes - longer) < num_peers:
        longer += 1
    return (side + 1,) * longer + (side,) * (num_axes - longer)


def next_shape(current: Shape, num_peers: int, group_size: int) -> Shape:
    """The present shape while all peers fit in and it is not too empty; otherwise `grid_shape`.

    A swarm whose size goes up and down by less than `LEAST_FILL_PERCENT` allows keeps the shape of its largest size.

    Raises:
        ValueError: See `grid_shape`; or the present shape is none.
    """
    _check_sizes(num_peers, group_size)
    places = capacity(current)
    fits = num_peers <= places and max(current) <= group_size
    return current if fits and 100 * num_peers >= LEAST_FILL_PERCENT * places else grid_shape(num_peers, group_size)


def capacity(shape: Shape) -> int:
    """The number of places in the grid.

    Raises:
        ValueError: There is no axis, or a side is not positive.
    """
    if not shape or min(shape) < 1:
        raise ValueError(f"{shape} is not the shape of a grid: it needs at least one side, and all of them positive")
    return math.prod(shape)


def sub_rounds(shape: Shape) -> int:
    """After so many sub-rounds everybody has heard of everybody: one for each axis."""
    capacity(shape)
    return len(shape)


def axis_of(shape: Shape, sub_round: int) -> int:
    """The axis along which peers average, ever the next one; count sub-rounds on over rounds that were cut short."""
    if sub_round < 0:
        raise ValueError(f"there is no sub-round {sub_round}")
    return sub_round % sub_rounds(shape)


def group_key(shape: Shape, axis: int, coordinates: Coordinates) -> GroupKey:
    """The name of a peer's group: the same for all that share all coordinates but the one on ``axis``.

    Raises:
        ValueError: There is no such axis, or the coordinates are not in the grid.
    """
    _check_place(shape, axis, coordinates)
    return (axis, *coordinates[:axis], *coordinates[axis + 1 :])


def start_coordinates(shape: Shape, seed: bytes, peer: str) -> Coordinates:
    """Where a peer starts that comes new to a grid of fixed coordinates.

    Some places get several peers and others none; the moves of `next_coordinates` even that out.

    Args:
        shape: The grid.
        seed: The same for all peers, such as the swarm's digest.
        peer: Who.
    """
    capacity(shape)
    return tuple(_draw(b"start", side, (axis, *shape), seed, peer) for axis, side in enumerate(shape))


def slot_offset(shape: Shape, lineage: bytes, round_: int, sub_round: int, key: GroupKey) -> int:
    """Where on its axis a group begins to place its members in `next_coordinates`; all of them compute the same."""
    _check_key(shape, key)
    return _draw(b"offset", shape[key[0]], (round_, sub_round, *key), lineage, "")


def next_coordinates(
    shape: Shape, axis: int, coordinates: Coordinates, members: Sequence[str], peer: str, offset: int = 0
) -> Coordinates:
    """Where a peer goes after its group averaged along ``axis``: on that axis to its index among the members.

    So the members of a group, who now hold the same, part to different groups of the next sub-round, as evenly as can
    be. In the paper they start at 0 (``offset=0``), which crowds the low end when groups are not full; beginning
    elsewhere in each group (`slot_offset`) keeps the next groups even, and needs up to 40 % fewer sub-rounds.

    Args:
        shape: The grid.
        axis: Along which the group averaged.
        coordinates: The peer's, until now.
        members: Who averaged, in the order on which all of them agree.
        peer: Who.
        offset: Where the group begins to place its members.

    Raises:
        ValueError: The peer is not a member; or see `group_key`.
    """
    _check_place(shape, axis, coordinates)
    if peer not in members:
        raise ValueError(f"{peer} did not average with that group, so it keeps its coordinates")
    slot = (members.index(peer) + offset) % shape[axis]
    return (*coordinates[:axis], slot, *coordinates[axis + 1 :])


@dataclass(frozen=True)
class Assignment:
    """Which coordinates to use, and why, in words that a log or a status page can show."""

    kind: Literal["fixed", "random"]
    reason: str


def choose_assignment(shape: Shape, num_peers: int, group_size: int, failure_rate: float) -> Assignment:
    """Fixed coordinates or random groups: whichever needs fewer sub-rounds.

    Fixed ones profit from order, since peers that just met part to different groups, and lose where failures disturb it
    or where their groups are small, because the grid is half empty or its sides are far below the group size.

    Args:
        shape: The grid.
        num_peers: Peers in it.
        group_size: The most members of a group.
        failure_rate: The share of peers that miss a sub-round.

    Raises:
        ValueError: A number is out of range.
    """
    places = capacity(shape)
    if not 0 <= failure_rate <= 1:
        raise ValueError(f"a failure rate of {failure_rate} is not between 0 and 1")
    if num_peers <= group_size:
        _check_sizes(num_peers, group_size)
        return Assignment("fixed", "the swarm fits in one group")
    fixed = num_peers * sum(shape) / len(shape) / places
    random = num_peers / cells_for(num_peers, group_size, MIXING_TAIL)
    limit = FIXED_SLOPE * (min(1.0, fixed / random) - FIXED_FROM)
    facts = f"groups of {fixed:.0f} in the grid, of {random:.0f} at random, and {failure_rate:.1%} of the peers fail"
    if failure_rate <= limit:
        return Assignment("fixed", f"{facts}: up to {limit:.1%} the order of fixed coordinates pays")
    return Assignment("random", f"{facts}: beyond {max(0.0, limit):.1%} random groups mix faster")


def merge_order(key: GroupKey, others: Iterable[GroupKey]) -> list[GroupKey]:
    """The groups that a group too small for itself should ask, in order: those whose keys differ least come first.

    Fewer differing coordinates first, then smaller differences, then the smaller key.

    Raises:
        ValueError: The groups do not average along the same axis of the same grid.
    """
    found = set(others) - {key}
    if any(len(other) != len(key) or other[:1] != key[:1] for other in found):
        raise ValueError("only groups of one sub-round can merge: they average along one axis of one grid")
    return sorted(found, key=lambda other: (*_distance(key, other), other))


def merge_plan(sizes: Mapping[GroupKey, int], least: int, group_size: int) -> dict[GroupKey, GroupKey]:
    """Which groups are too small, and into which others they go; those not named stay where they are.

    A group goes to a larger one, or to one as large with a smaller key, so that no two go to each other; to the first
    in `merge_order` that stays within ``group_size``. The smallest go first, of those the one with the largest key. All
    that see the same sizes come to the same plan; it leaves a group too small only if no group has room for it.

    Args:
        sizes: Members by group, as far as known; empty groups take nobody in.
        least: Groups below this size look for another.
        group_size: The most members of a group.

    Raises:
        ValueError: A number is out of range, or see `merge_order`.
    """
    if not 1 <= least <= group_size or any(size < 0 for size in sizes.values()):
        raise ValueError(f"groups of at least {least} and at most {group_size} members cannot be made of {dict(sizes)}")
    now = {key: size for key, size in sizes.items() if size}
    gone: dict[GroupKey, GroupKey] = {}
    for _ in range(len(now)):
        small = sorted((size, *(-part for part in key)) for key, size in now.items() if size < least)
        moves = ((key := tuple(-part for part in parts), _target(now, key, group_size)) for _, *parts in small)
        move = next(((key, target) for key, target in moves if target is not None), None)
        if move is None:
            break
        key, target = move
        now[target] += now.pop(key)
        gone = {moved: target if to == key else to for moved, to in gone.items()} | {key: target}
    return gone


def merge_target(key: GroupKey, sizes: Mapping[GroupKey, int], least: int, group_size: int) -> GroupKey:
    """The group to which the members of ``key`` go by `merge_plan`; their own if they stay."""
    return merge_plan(sizes, least, group_size).get(key, key)


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
        level: The level of the tree, or the sub-round of random groups that mix.
        peer: Who.
        num_cells: How many there are; the same for all that hold the head.
        choice: 0 at first; 1 for the cell to go to when the first one is full, and so on.

    Raises:
        ValueError: A number is out of range.
    """
    if num_cells < 1:
        raise ValueError(f"there must be at least one cell, not {num_cells}")
    return _draw(b"cell", num_cells, (round_, level, choice), lineage, peer)


def cell_overflow(num_peers: int, num_cells: int, group_size: int) -> float:
    """The chance that a given one of the cells gets more than ``group_size`` peers: a binomial tail.

    ``P(X > g)`` for X of ``num_peers`` that come to the cell with probability ``1 / num_cells`` each, computed as one
    minus the sum of the first g + 1 terms, each from the one before: ``p_(k+1) = p_k (n - k) / (k + 1) / (c - 1)``.
    Right to 30 digits after the point, and the same on every machine.

    Raises:
        ValueError: A number is not positive.
    """
    _check_counts(num_peers, num_cells, group_size)
    if num_peers <= group_size:
        return 0.0
    if num_cells == 1:
        return 1.0
    with localcontext(_DECIMALS):
        return max(0.0, float(1 - sum(_binomial(num_peers, num_cells, group_size))))


def left_out(num_peers: int, num_cells: int, group_size: int) -> float:
    """The share of peers, on average, that come to a cell which has its ``group_size`` of those before them.

    ``c / n · E[max(0, X - g)]`` for X as in `cell_overflow`, where the expectation is ``n / c - g`` plus the sum of
    ``(g - k) p_k`` over the first g + 1 terms. As exact, and the same on every machine.

    Raises:
        ValueError: A number is not positive.
    """
    _check_counts(num_peers, num_cells, group_size)
    if num_peers <= group_size:
        return 0.0
    if num_cells == 1:
        return 1 - group_size / num_peers
    with localcontext(_DECIMALS):
        terms = _binomial(num_peers, num_cells, group_size)
        room = sum((group_size - count) * term for count, term in enumerate(terms))
        return max(0.0, float(1 + (room - group_size) * num_cells / num_peers))


def _binomial(num_peers: int, num_cells: int, most: int) -> list[Decimal]:
    """The chances that a cell gets 0, 1, ... ``most`` peers, in the context that is set."""
    terms = [(1 - Decimal(1) / num_cells) ** num_peers]
    for count in range(most):
        terms.append(terms[-1] * (num_peers - count) / ((count + 1) * (num_cells - 1)))
    return terms


@lru_cache(maxsize=1024)
def cells_for(num_peers: int, group_size: int, tail: float = MIXING_TAIL) -> int:
    """The fewest cells of which each gets more than ``group_size`` peers with a chance of at most ``tail``.

    Raises:
        ValueError: A number is out of range.
    """
    _check_sizes(num_peers, group_size)
    if not 0 < tail < 1:
        raise ValueError(f"a chance of {tail} is not between 0 and 1")
    return _fewest(1, lambda cells: cell_overflow(num_peers, cells, group_size) <= tail)


@lru_cache(maxsize=1024)
def tree_cells(num_peers: int, group_size: int) -> int:
    """The fewest cells of a tree's first level that leave out `MOST_LEFT_OUT` of the peers and are not too full.

    That makes 51 peers a cell for groups of 64, 12 for groups of 16, less than 5 for groups of 8 and 2 for groups of 4.

    Raises:
        ValueError: A number is out of range.
    """
    _check_sizes(num_peers, group_size)
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


def num_levels(num_peers: int, group_size: int) -> int:
    """The sub-rounds after which a tree with delegates holds the exact mean; 1 while the swarm fits in one group."""
    return len(level_cells(num_peers, group_size))


def parent_cell(cell: int, num_cells: int, num_parents: int) -> int:
    """The cell of the next level in which this one's delegate averages: contiguous cells, as evenly as can be.

    Raises:
        ValueError: There is no such cell, or the next level has more cells than this one.
    """
    if not 0 <= cell < num_cells or not 1 <= num_parents <= num_cells:
        raise ValueError(f"cell {cell} of {num_cells} has no parent among {num_parents}")
    return cell * num_parents // num_cells


def _target(sizes: Mapping[GroupKey, int], key: GroupKey, group_size: int) -> GroupKey | None:
    """The group that takes another in whole, of those that outrank it."""
    size = sizes[key]
    outranking = (other for other, count in sizes.items() if (count, key) > (size, other))
    room = (other for other in outranking if sizes[other] + size <= group_size)
    return next(iter(merge_order(key, room)), None)


def _distance(first: GroupKey, second: GroupKey) -> tuple[int, int]:
    differences = [abs(a - b) for a, b in zip(first, second, strict=True)]
    return sum(map(bool, differences)), sum(differences)


def _hash(purpose: bytes, numbers: Iterable[int], shared: bytes, peer: str) -> bytes:
    """32 bytes for one decision. The id comes last: in a swarm, all that is before it is of one length a purpose."""
    try:
        encoded = b"".join(number.to_bytes(8, "big") for number in numbers)
    except OverflowError as error:
        raise ValueError("rounds, levels and choices are counted from 0, in 8 bytes") from error
    return hashlib.sha256(b"p2ptrain grid " + purpose + encoded + shared + peer.encode()).digest()


def _draw(purpose: bytes, bound: int, numbers: Iterable[int], shared: bytes, peer: str) -> int:
    """A number in ``[0, bound)``, uniform but for 2**-64 or so."""
    return int.from_bytes(_hash(purpose, numbers, shared, peer)[:16], "big") * bound >> 128


def _check_sizes(num_peers: int, group_size: int) -> None:
    if num_peers < 1 or group_size < 1 or (group_size == 1 and num_peers > 1):
        raise ValueError(f"{num_peers} peers cannot average in groups of {group_size}: groups need two members to mix")


def _check_counts(num_peers: int, num_cells: int, group_size: int) -> None:
    if min(num_peers, num_cells, group_size) < 1:
        raise ValueError(f"{num_peers} peers in {num_cells} cells of {group_size} make no sense")


def _check_place(shape: Shape, axis: int, coordinates: Coordinates) -> None:
    capacity(shape)
    if not 0 <= axis < len(shape):
        raise ValueError(f"a grid of shape {shape} has no axis {axis}")
    if len(coordinates) != len(shape) or not all(0 <= x < side for x, side in zip(coordinates, shape, strict=True)):
        raise ValueError(f"{coordinates} is not a place in a grid of shape {shape}")


def _check_key(shape: Shape, key: GroupKey) -> None:
    if not key:
        raise ValueError("a group's key begins with its axis")
    _check_place(shape, key[0], (*key[1 : key[0] + 1], 0, *key[key[0] + 1 :]))
