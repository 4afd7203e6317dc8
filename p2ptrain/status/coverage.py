"""Coverage: the hosts of each block or stage, compact enough for templates and scripts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from p2ptrain.status.stages import TRAINING_ROLES, holds, hosts_stage
from p2ptrain.status.views import PeerView, Snapshot

MAX_ROWS = 20
"""Limit of peers drawn block by block; peers in trouble come first."""
MAX_CELLS = 48
"""Limit of cells in a row; in a deeper model, a cell is several blocks."""
UNUSUAL = ("draining", "paused", "starting", "syncing")


@dataclass(frozen=True)
class Row:
    """One peer's row; a cell is True if the peer holds all of its blocks. Cells are stages if blocks are unknown."""

    peer: str
    name: str
    state: str
    cells: tuple[bool, ...]


@dataclass(frozen=True)
class Coverage:
    """The coverage at one moment.

    Attributes:
        stages: The values of each `StageView`, with numbers in place of lists of peers.
        rows: At most `MAX_ROWS`; ``others``: number of further peers that hold blocks, or are about to.
        states: (state, number of peers), the most frequent first.
    """

    stages: tuple[dict[str, Any], ...]
    rows: tuple[Row, ...]
    others: int
    states: tuple[tuple[str, int], ...]
    num_blocks: int


def coverage(snapshot: Snapshot) -> Coverage:
    num_blocks = snapshot.swarm.num_blocks
    # In a pipeline, the role ``trainer`` only sends microbatches.
    roles = ("stage",) if len(snapshot.stages) > 1 else TRAINING_ROLES
    trainers = [peer for peer in snapshot.peers if peer.record.role in roles]
    trainers.sort(key=lambda peer: (urgency(peer), peer.spans, peer.name.casefold()))
    states = Counter(peer.record.state for peer in snapshot.peers)
    return Coverage(
        stages=tuple(
            {**vars(each), "hosts": len(each.hosts), "syncing": len(each.syncing)} for each in snapshot.stages
        ),
        rows=tuple(_row(peer, num_blocks, len(snapshot.stages)) for peer in trainers[:MAX_ROWS]),
        others=max(0, len(trainers) - MAX_ROWS),
        states=tuple(sorted(states.items(), key=lambda item: (-item[1], item[0]))),
        num_blocks=num_blocks,
    )


def urgency(peer: PeerView) -> tuple[bool, bool]:
    """Return a sort key that puts peers in trouble first."""
    return (peer.agrees is not False, peer.record.state not in UNUSUAL)


def state_of(peer: PeerView) -> str:
    """Return a peer's state; ``astray`` if its digest differs from the majority's."""
    return "astray" if peer.agrees is False else peer.record.state


def _row(peer: PeerView, num_blocks: int, num_stages: int) -> Row:
    if num_blocks:
        num_cells = min(num_blocks, MAX_CELLS)
        borders = [cell * num_blocks // num_cells for cell in range(num_cells + 1)]
        cells = tuple(holds(peer, span) for span in pairwise(borders))
    else:
        cells = tuple(hosts_stage(peer, number) for number in range(num_stages))
    return Row(peer.record.peer, peer.name, state_of(peer), cells)
