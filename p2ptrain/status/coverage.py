"""Who covers the model, in few enough words and cells for a page: the same for templates and for scripts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from p2ptrain.status.stages import TRAINING_ROLES, holds, hosts_stage
from p2ptrain.status.views import PeerView, Snapshot

MAX_ROWS = 20
"""Peers drawn block by block; of a larger swarm, those that deserve a look come first."""
MAX_CELLS = 48
"""Cells in a row; a deeper model has several blocks in one."""
UNUSUAL = ("draining", "paused", "starting", "syncing")


@dataclass(frozen=True)
class StageSummary:
    """A stage without the list of its hosts, which in a large swarm is long."""

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
    """One peer's line.

    Attributes:
        cells: By cell: whether the peer holds all blocks in it; by stage, where blocks are not known.
    """

    peer: str
    name: str
    state: str
    cells: tuple[bool, ...]


@dataclass(frozen=True)
class Coverage:
    """What is drawn.

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
    """The picture of one moment."""
    num_blocks = snapshot.swarm.num_blocks
    # Who only feeds a pipeline holds nothing, and never will.
    roles = ("stage",) if len(snapshot.stages) > 1 else TRAINING_ROLES
    trainers = sorted((peer for peer in snapshot.peers if peer.role in roles), key=_interest)
    states = Counter(peer.state for peer in snapshot.peers)
    return Coverage(
        stages=tuple(
            StageSummary(
                each.number, each.blocks, len(each.hosts), len(each.syncing), each.waiting, each.tokens_per_second,
                each.load, each.is_bottleneck, each.risk,
            )
            for each in snapshot.stages
        ),
        rows=tuple(_row(peer, num_blocks, len(snapshot.stages)) for peer in trainers[:MAX_ROWS]),
        others=max(0, len(trainers) - MAX_ROWS),
        states=tuple(sorted(states.items(), key=lambda item: (-item[1], item[0]))),
        num_blocks=num_blocks,
    )  # fmt: skip


def _interest(peer: PeerView) -> tuple[bool, bool, tuple[int, int], str]:
    return (peer.agrees is not False, peer.state not in UNUSUAL, peer.blocks, peer.name.casefold())


def _row(peer: PeerView, num_blocks: int, num_stages: int) -> Row:
    state = peer.state if peer.agrees is not False else "astray"
    if not num_blocks:
        return Row(peer.peer, peer.name, state, tuple(hosts_stage(peer, number) for number in range(num_stages)))
    num_cells = min(num_blocks, MAX_CELLS)
    borders = [cell * num_blocks // num_cells for cell in range(num_cells + 1)]
    return Row(
        peer.peer,
        peer.name,
        state,
        tuple(holds(peer, (borders[cell], borders[cell + 1])) for cell in range(num_cells)),
    )
