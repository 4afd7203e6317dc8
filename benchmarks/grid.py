"""Moshpit SGD's grid, which `benchmarks.bench_moshpit` compares with the product's tree.

Peers meet others in every *sub-round*, and come closer by a constant factor (Ryabinin et al., section 3.2,
https://arxiv.org/abs/2103.03239). With *fixed* coordinates (`start_coordinates`, `next_coordinates`) the peers of a
d-dimensional grid that share all coordinates but one are a group, and that one rotates. If each place has one peer and
no peer fails, all peers hold the exact mean after d sub-rounds. *Random* groups
(`p2ptrain.averaging.grouping.cells.cell_of` with `cells_for`) are drawn anew each time and need no memory.
`choose_assignment` says which mixes faster.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Shape = tuple[int, ...]
"""The grid's side lengths, one for each axis."""
Coordinates = tuple[int, ...]
"""A peer's place in the grid, one for each axis; several peers may share it."""
GroupKey = tuple[int, ...]
"""The axis, then the coordinates on all other axes, in order."""

MIXING_TAIL = 0.25
"""How likely a cell of random groups may get more peers than fit in a group; some then make a second try."""
FIXED_FROM, FIXED_SLOPE = 0.5, 0.1
"""From the benchmark's sweep: fixed coordinates need fewer sub-rounds while the failure rate is within the slope times
(q - from), where q is the size of their groups divided by that of random ones. With two axes a little longer."""


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


def capacity(shape: Shape) -> int:
    """The number of places in the grid.

    Raises:
        ValueError: There is no axis, or a side is not positive.
    """
    if not shape or min(shape) < 1:
        raise ValueError(f"{shape} is not the shape of a grid: it needs at least one side, and all of them positive")
    return math.prod(shape)


def axis_of(shape: Shape, sub_round: int) -> int:
    """The axis along which peers average, ever the next one; count sub-rounds on over rounds that were cut short."""
    if sub_round < 0:
        raise ValueError(f"there is no sub-round {sub_round}")
    return sub_round % len(shape)


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
    """Which coordinates to use, and why."""

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


@lru_cache(maxsize=1024)
def cells_for(num_peers: int, group_size: int, tail: float = MIXING_TAIL) -> int:
    """The fewest cells of which each gets more than ``group_size`` peers with a chance of at most ``tail``.

    Raises:
        ValueError: A number is out of range.
    """
    _check_sizes(num_peers, group_size)
    if not 0 < tail < 1:
        raise ValueError(f"a chance of {tail} is not between 0 and 1")
    too_few, enough = 0, 1
    while cell_overflow(num_peers, enough, group_size) > tail:
        too_few, enough = enough, 2 * enough
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        fits = cell_overflow(num_peers, middle, group_size) <= tail
        too_few, enough = (too_few, middle) if fits else (middle, enough)
    return enough


def cell_overflow(num_peers: int, num_cells: int, group_size: int) -> float:
    """The chance that a given one of the cells gets more than ``group_size`` peers: a binomial tail.

    ``P(X > g)`` for X of ``num_peers`` that come to the cell with probability ``1 / num_cells`` each, computed as one
    minus the sum of the first g + 1 terms, each from the one before: ``p_(k+1) = p_k (n - k) / (k + 1) / (c - 1)``.

    Raises:
        ValueError: A number is not positive.
    """
    if min(num_peers, num_cells, group_size) < 1:
        raise ValueError(f"{num_peers} peers in {num_cells} cells of {group_size} make no sense")
    if num_peers <= group_size:
        return 0.0
    if num_cells == 1:
        return 1.0
    terms = [(1 - 1 / num_cells) ** num_peers]
    for count in range(group_size):
        terms.append(terms[-1] * (num_peers - count) / ((count + 1) * (num_cells - 1)))
    return max(0.0, 1 - math.fsum(terms))


def _draw(purpose: bytes, bound: int, numbers: Iterable[int], shared: bytes, peer: str) -> int:
    """A number in ``[0, bound)``, by hash."""
    encoded = b"".join(number.to_bytes(8, "big") for number in numbers)
    digest = hashlib.sha256(b"p2ptrain grid " + purpose + encoded + shared + peer.encode()).digest()
    return int.from_bytes(digest[:16], "big") * bound >> 128


def _check_sizes(num_peers: int, group_size: int) -> None:
    if num_peers < 1 or group_size < 1 or (group_size == 1 and num_peers > 1):
        raise ValueError(f"{num_peers} peers cannot average in groups of {group_size}: groups need two members to mix")


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
