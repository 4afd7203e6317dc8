"""The hosts of each block or stage, in few enough words and cells for templates and scripts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from p2ptrain.status.stages import TRAINING_ROLES, holds, hosts_stage
from p2ptrain.status.views import PeerView, Snapshot

MAX_ROWS = 20
"""Peers drawn block by block; of a larger swarm, those that deserve a look come first."""
MAX_CELLS = 48
"""Cells in a row; a deeper model has several blocks in one."""
UNUSUAL = ("draining", "paused", "starting", "syncing")


@dataclass(frozen=True)
class StageSummary:
    """A stage with numbers of peers in place of lists, which are long in a large swarm."""

    number: int
    blocks: tuple[int, int]
    hosts: int
    syncing: int
    waiting: int
    tokens_per_second: float
    load: float | None
    is_bottleneck: bool
    risk: str


@dataclass(frozen=True)
class Row:
    """One peer's row.

    Attributes:
        cells: By cell: whether the peer holds all blocks in it; by stage, where blocks are not known.
    """

    peer: str
    name: str
    state: str
    cells: tuple[bool, ...]


@dataclass(frozen=True)
class Coverage:
    """The picture of one moment.

    Attributes:
        rows: At most `MAX_ROWS`; ``others``: peers without one that hold blocks, or are about to.
        states: (role and state, number of peers), the most frequent first.
    """

    stages: tuple[StageSummary, ...]
    rows: tuple[Row, ...]
    others: int
    states: tuple[tuple[str, int], ...]
    num_blocks: int


def coverage(snapshot: Snapshot) -> Coverage:
    num_blocks = snapshot.swarm.num_blocks
    # Who only feeds a pipeline holds nothing, and never will.
    roles = ("stage",) if len(snapshot.stages) > 1 else TRAINING_ROLES
    trainers = sorted((peer for peer in snapshot.peers if peer.record.role in roles), key=_interest)
    states = Counter(peer.record.state for peer in snapshot.peers)
    return Coverage(
        stages=tuple(
            StageSummary(**{**vars(each), "hosts": len(each.hosts), "syncing": len(each.syncing)})
            for each in snapshot.stages
        ),
        rows=tuple(_row(peer, num_blocks, len(snapshot.stages)) for peer in trainers[:MAX_ROWS]),
        others=max(0, len(trainers) - MAX_ROWS),
        states=tuple(sorted(states.items(), key=lambda item: (-item[1], item[0]))),
        num_blocks=num_blocks,
    )


def urgency(peer: PeerView) -> tuple[bool, bool]:
    """Return a key that sorts peers in trouble before all others."""
    return (peer.agrees is not False, peer.record.state not in UNUSUAL)


def state_of(peer: PeerView) -> str:
    """Return a peer's state; ``astray`` for a peer with another digest than the majority."""
    return "astray" if peer.agrees is False else peer.record.state


def _interest(peer: PeerView) -> tuple[tuple[bool, bool], tuple[tuple[int, int], ...], str]:
    return (urgency(peer), peer.spans, peer.name.casefold())


def _row(peer: PeerView, num_blocks: int, num_stages: int) -> Row:
    if num_blocks:
        num_cells = min(num_blocks, MAX_CELLS)
        borders = [cell * num_blocks // num_cells for cell in range(num_cells + 1)]
        cells = tuple(holds(peer, span) for span in pairwise(borders))
    else:
        cells = tuple(hosts_stage(peer, number) for number in range(num_stages))
    return Row(peer.record.peer, peer.name, state_of(peer), cells)
