"""Peers that average single numbers or small vectors in groups, simulated: for `bench_moshpit`.

The groups are those of Moshpit SGD's experiment (Ryabinin et al., section 3.2, https://arxiv.org/abs/2103.03239) and of
`p2ptrain.averaging.grouping.cells`, asked for each peer; only the arithmetic is done for all peers at once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from p2ptrain.averaging.grouping.cells import cell_of, delegate_order, level_cells, parent_cell

Values = NDArray[np.float64]
"""What the peers hold: (peers, values)."""
Groups = list[list[int]]
"""Indices of peers; who is in none misses the sub-round."""

DONE = 1e-9
"""Peers count as agreed when the variance of what they hold, 1 at first, is below this."""
CHOICES = 6
"""Cells that a peer tries, counting the first, before it misses a sub-round because all were full."""
TAIL = 0.25
"""How likely a cell of random groups may get more peers than fit in a group; some then make another try."""


@lru_cache(maxsize=1024)
def cells_for(num_peers: int, group_size: int) -> int:
    """The fewest cells of which each gets more than ``group_size`` peers with a chance of at most `TAIL`."""
    too_few, enough = 0, 1
    while cell_overflow(num_peers, enough, group_size) > TAIL:
        too_few, enough = enough, 2 * enough
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        fits = cell_overflow(num_peers, middle, group_size) <= TAIL
        too_few, enough = (too_few, middle) if fits else (middle, enough)
    return enough


def cell_overflow(num_peers: int, num_cells: int, group_size: int) -> float:
    """The chance that a given one of the cells gets more than ``group_size`` peers: a binomial tail.

    ``P(X > g)`` for X of ``num_peers`` that come to the cell with probability ``1 / num_cells`` each, computed as one
    minus the sum of the first g + 1 terms, each from the one before: ``p_(k+1) = p_k (n - k) / (k + 1) / (c - 1)``.
    """
    if num_peers <= group_size:
        return 0.0
    if num_cells == 1:
        return 1.0
    terms = [(1 - 1 / num_cells) ** num_peers]
    for count in range(group_size):
        terms.append(terms[-1] * (num_peers - count) / ((count + 1) * (num_cells - 1)))
    return max(0.0, 1 - math.fsum(terms))


def by_key(members: Iterable[int], key_of: Sequence[Hashable]) -> Groups:
    """Those with the same key are a group."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for member in members:
        groups[key_of[member]].append(member)
    return list(groups.values())


class Mixer(ABC):
    """A way to put peers into groups, sub-round by sub-round.

    Attributes:
        joined: Groups joined so far, summed over peers.
        keys: Directory keys that peers looked up so far for that, summed over peers.
    """

    def __init__(self, count: int, generator: np.random.Generator) -> None:
        self.peers = [f"peer {index}" for index in range(count)]
        self.lineage = generator.bytes(32)  # Groups are drawn from it.
        self.joined = self.keys = 0

    @abstractmethod
    def groups(self, sub_round: int, alive: list[int]) -> Groups:
        """The groups of those that did not fail."""

    def step(self, sub_round: int, alive: list[int]) -> Groups:
        """`groups`, and counts what they cost."""
        groups = self.groups(sub_round, alive)
        self.joined += sum(map(len, groups))
        self.keys += len(alive)
        return groups


class PaperGrid(Mixer):
    """The grid of the paper's experiment: peers on different places, drawn at random, where they stay for ever.

    Peers that share all coordinates but one are a group, and that one rotates. If each place has a peer and none fails,
    all hold the exact mean after as many sub-rounds as the grid has axes.
    """

    def __init__(self, count: int, generator: np.random.Generator, shape: tuple[int, ...]) -> None:
        super().__init__(count, generator)
        places = generator.choice(math.prod(shape), size=count, replace=False)
        at = [tuple(map(int, place)) for place in zip(*np.unravel_index(places, shape), strict=True)]
        self._keys = [[(*place[:axis], *place[axis + 1 :]) for place in at] for axis in range(len(shape))]

    def groups(self, sub_round: int, alive: list[int]) -> Groups:
        return by_key(alive, self._keys[sub_round % len(self._keys)])


class PaperRandom(Mixer):
    """The random groups of the paper's experiment: all alive, shuffled and cut; the rest is dealt out to the groups."""

    def __init__(self, count: int, generator: np.random.Generator, group_size: int) -> None:
        super().__init__(count, generator)
        self._group_size = group_size

    def groups(self, sub_round: int, alive: list[int]) -> Groups:
        place = {self.peers[member]: member for member in alive}
        order = [place[peer] for peer in delegate_order(self.lineage, 0, sub_round, place)]
        number = max(1, len(order) // self._group_size)
        whole = number * self._group_size
        groups = [order[first : first + self._group_size] for first in range(0, whole, self._group_size)]
        for index, member in enumerate(order[whole:]):
            groups[index % number].append(member)
        return groups


class Cells(Mixer):
    """Random groups: whom a cell has no room for tries its next choice, if there is one."""

    def __init__(
        self, count: int, generator: np.random.Generator, num_cells: int, group_size: int, choices: int = CHOICES
    ) -> None:
        super().__init__(count, generator)
        self._num_cells, self._group_size, self._choices = num_cells, group_size, choices

    def groups(self, sub_round: int, alive: list[int]) -> Groups:
        return [cell for cell in self.place(sub_round, alive) if cell]

    def place(self, sub_round: int, alive: list[int]) -> Groups:
        """Who is in each of the cells, empty ones included."""
        cells: list[list[int]] = [[] for _ in range(self._num_cells)]
        waiting = alive
        for choice in range(self._choices):
            late: list[int] = []
            self.keys += len(waiting) if choice else 0
            for member in waiting:
                cell = cell_of(self.lineage, choice, sub_round, self.peers[member], self._num_cells)
                (cells[cell] if len(cells[cell]) < self._group_size else late).append(member)
            waiting = late
        return cells


def average(values: Values, groups: Groups, weights: Values | None = None) -> None:
    """Give every member its group's mean, weighted by ``weights`` (peers) if there are any."""
    for members in groups:
        values[members] = np.average(values[members], axis=0, weights=None if weights is None else weights[members])


def survivors(count: int, failure_rate: float, generator: np.random.Generator) -> list[int]:
    """Who does not fail in this sub-round."""
    return [int(member) for member in np.flatnonzero(generator.random(count) >= failure_rate)]


@dataclass(frozen=True)
class Mixed:
    """How one run went.

    Attributes:
        sub_rounds: Until the variance was below `DONE`, or as many as were allowed.
        variances: Of what all peers hold, failed ones included, after each sub-round; the first before any.
        joined: Groups that a peer joined, on average.
        keys: Directory keys that a peer looked up, on average.
        sent: Vectors that a peer sent, on average: 2 (n - 1) / n in a butterfly of n.
    """

    sub_rounds: int
    variances: tuple[float, ...]
    joined: float
    keys: float
    sent: float


def butterfly_vectors(groups: Groups) -> float:
    """Vectors that all members of the groups send, and receive, together."""
    return sum(2.0 * (len(members) - 1) for members in groups)


def mix(mixer: Mixer, failure_rate: float, generator: np.random.Generator, values: int = 1, most: int = 60) -> Mixed:
    """Let peers that hold values of N(0, 1) average until they agree.

    Args:
        mixer: Which groups.
        failure_rate: The chance that a peer misses a sub-round; it then keeps what it has.
        generator: Where values and failures come from.
        values: How many each peer holds.
        most: Sub-rounds after which to stop in any case.
    """
    count = len(mixer.peers)
    held = generator.standard_normal((count, values))
    variances, sent = [float(held.var(axis=0).mean())], 0.0
    while variances[-1] >= DONE and len(variances) <= most:
        groups = mixer.step(len(variances) - 1, survivors(count, failure_rate, generator))
        average(held, groups)
        sent += butterfly_vectors(groups)
        variances.append(float(held.var(axis=0).mean()))
    return Mixed(len(variances) - 1, tuple(variances), mixer.joined / count, mixer.keys / count, sent / count)


@dataclass(frozen=True)
class Climbed:
    """How one round of a tree with delegates went.

    Attributes:
        sub_rounds: The levels of the tree.
        missed: The share of contributions whose own peers failed, or found no room, in the first sub-round.
        lost: The share of contributions that were lost with delegates.
        error: Of the result, against the weighted mean of the contributions that were not lost.
        offset: Of the result, against the weighted mean of all; in standard deviations of a contribution.
        joined: Groups that a peer joined, on average.
        keys: Directory keys that a peer looked up, on average, the one where it learns of the result included.
        sent: Vectors that a peer sent in butterflies, on average; the replay adds at most one in.
        most_sent: Vectors that the delegate which went furthest sent in butterflies.
    """

    sub_rounds: int
    missed: float
    lost: float
    error: float
    offset: float
    joined: float
    keys: float
    sent: float
    most_sent: float


def climb(count: int, group_size: int, failure_rate: float, tries: int, generator: np.random.Generator) -> Climbed:
    """One round of a tree with delegates, of peers that hold values of N(0, 1) with weights of 1 to 16.

    Args:
        count: Peers.
        group_size: The most members of a group.
        failure_rate: The chance that a peer misses a sub-round.
        tries: Delegates that are tried for each group in each sub-round, one after the other.
        generator: Where values, weights and failures come from.
    """
    levels = level_cells(count, group_size)
    draw = Cells(count, generator, levels[0], group_size, choices=1)  # In a tree, a peer has one cell.
    held, weights = generator.standard_normal(count), generator.integers(1, 17, count).astype(np.float64)
    alive = survivors(count, failure_rate, generator)
    cells = [_Cell(held, weights, members, members) for members in draw.place(0, alive)]
    in_time = sum(len(cell.members) for cell in cells)
    sent = np.zeros(count)
    joined, keys = in_time, draw.keys + len(alive) + count
    for level in range(1, len(levels)):
        groups: list[list[tuple[int, _Cell]]] = [[] for _ in range(levels[level])]
        for index, cell in enumerate(cells):
            sent[cell.members] += 2 - 2 / max(1, len(cell.members))
            delegate = cell.delegate(draw, level, tries, failure_rate, generator)
            if delegate is not None:
                groups[parent_cell(index, levels[level - 1], levels[level])].append((delegate, cell))
        joined, keys = joined + sum(map(len, groups)), keys + sum(map(len, groups))
        cells = [_Cell.of_delegates(group) for group in groups]
    (top,) = cells
    sent[top.members] += 2 - 2 / max(1, len(top.members))
    kept = top.contributors
    return Climbed(
        sub_rounds=len(levels),
        missed=1 - in_time / count,
        lost=(in_time - len(kept)) / count,
        error=abs(top.mean - float(np.average(held[kept], weights=weights[kept]))) if kept else 0.0,
        offset=abs(top.mean - float(np.average(held, weights=weights))),
        joined=joined / count,
        keys=keys / count,
        sent=float(sent.mean()),
        most_sent=float(sent.max()),
    )


class _Cell:
    """A group of a tree, and what it knows.

    Attributes:
        mean: The weighted mean of all contributions below it; 0 without any.
        weight: Their total weight.
        members: Who averaged here, and can stand for it.
        contributors: Whose contributions those are.
    """

    def __init__(self, means: Values, weights: Values, members: list[int], contributors: list[int]) -> None:
        self.mean = float(np.average(means[members], weights=weights[members])) if members else 0.0
        self.weight = float(weights[members].sum())
        self.members, self.contributors = members, contributors

    @classmethod
    def of_delegates(cls, group: list[tuple[int, _Cell]]) -> _Cell:
        """The group of these delegates, each of which brings what its cell knows."""
        delegates = [delegate for delegate, _ in group]
        size = max(delegates, default=-1) + 1
        means, weights = np.zeros(size), np.zeros(size)
        for delegate, cell in group:
            means[delegate], weights[delegate] = cell.mean, cell.weight
        return cls(means, weights, delegates, [peer for _, cell in group for peer in cell.contributors])

    def delegate(
        self, draw: Cells, level: int, tries: int, failure_rate: float, generator: np.random.Generator
    ) -> int | None:
        """Who takes what is known here to the next level; None when all that are tried fail."""
        place = {draw.peers[member]: member for member in self.members}
        order = delegate_order(draw.lineage, 0, level, place)[:tries]
        return next((place[peer] for peer in order if generator.random() >= failure_rate), None)
