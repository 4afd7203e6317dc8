"""The stages of a model: their hosts, speeds, the risk of losing a host, and the coverage of each block.

A model that is not cut is one stage, which every trainer holds. In a pipeline, each stage's hosts average among
themselves, with their own rounds, lineage and digest. So states are compared only within one stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from p2ptrain.network.records.record import PeerRecord, StageReport
from p2ptrain.status.views import PeerView, Snapshot, StageView

HOSTING = ("training", "serving", "paused")
ARRIVING = ("starting", "syncing")
TRAINING_ROLES = ("trainer", "stage")
"""Roles that hold the model or a part of it, or send microbatches."""
WHOLE = -1
"""Stage number of a model that is not cut."""
MAX_ROWS = 20
"""Limit of peers drawn block by block; peers in trouble come first."""
MAX_CELLS = 48
"""Limit of cells in a row; in a deeper model, a cell is several blocks."""
UNUSUAL = ("draining", "paused", "resting", "starting", "syncing")


Held = PeerRecord | StageReport
"""A peer's position in one lineage: its whole record if the model is not cut, else its report of a stage."""


def reports_of(record: PeerRecord, num_stages: int) -> list[StageReport]:
    """Return a peer's reports of existing stages and of shared embeddings; empty for a model of one stage."""
    return [stage for stage in record.stages if stage.unit <= num_stages] if num_stages > 1 else []


def positions(record: PeerRecord, num_stages: int) -> list[tuple[int, Held]]:
    """Return a peer's position in each lineage that it averages, with the stage (`WHOLE` if the model is not cut).

    Empty for peers that do not average.
    """
    if record.role not in TRAINING_ROLES:
        return []
    return [(WHOLE, record)] if num_stages == 1 else [(each.unit, each) for each in reports_of(record, num_stages)]


def joined(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return spans of blocks in order, with adjacent and overlapping spans merged."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def hosts_stage(peer: PeerView, number: int) -> bool:
    """True if a peer has the state of a stage; also for unknown blocks."""
    return any(each.report.unit == number and any(each.report.digest) for each in peer.hosting)


def holds(peer: PeerView, span: tuple[int, int]) -> bool:
    """True if a peer has all blocks of a span."""
    return any(low <= span[0] and span[1] <= high for low, high in peer.spans)


def stage_views(spans: Sequence[tuple[int, int]], peers: Sequence[PeerView]) -> list[StageView]:
    """Return a view of each stage, with its hosts and the risk of losing one.

    ``spans`` has, by stage, its first block and the one after its last.
    """
    hosts = [_hosts(peers, HOSTING, number, span) for number, span in enumerate(spans)]
    if len(spans) == 1 and hosts[0]:  # A replica at rest follows the rounds; the host of a stage at rest does no work.
        hosts = [_hosts(peers, (*HOSTING, "resting"), 0, spans[0])]
    speeds = [sum(_speed(peer, number) for peer in of_stage) for number, of_stage in enumerate(hosts)]
    loads = _loads([bool(of_stage) for of_stage in hosts], speeds)
    return [
        StageView(
            number=number,
            blocks=span,
            hosts=tuple(peer.record.peer for peer in of_stage),
            syncing=tuple(peer.record.peer for peer in peers if _is_on_the_way(peer, number, len(spans))),
            waiting=sum(
                each.report.waiting for peer in of_stage for each in peer.hosting if each.report.unit == number
            ),
            tokens_per_second=speed,
            load=load,
            is_bottleneck=len(spans) > 1 and (not of_stage or (load == 1.0 and min(speeds) < max(speeds))),
            risk=_risk(number, len(spans), of_stage),
        )
        for number, (span, of_stage, speed, load) in enumerate(zip(spans, hosts, speeds, loads, strict=True))
    ]


def _hosts(peers: Sequence[PeerView], states: Sequence[str], number: int, span: tuple[int, int]) -> list[PeerView]:
    return [
        peer
        for peer in peers
        if peer.record.state in states and (holds(peer, span) if span[0] < span[1] else hosts_stage(peer, number))
    ]


def _speed(peer: PeerView, stage: int) -> float:
    """Return a host's measured speed for a stage, or the training speed of a peer with the whole model."""
    if not peer.hosting:
        return peer.record.tokens_per_second
    return sum(each.report.tokens_per_second for each in peer.hosting if each.report.unit == stage)


def _loads(covered: Sequence[bool], speeds: Sequence[float]) -> list[float | None]:
    if len(speeds) < 2 or not all(covered) or min(speeds) <= 0:
        return [None] * len(speeds)
    return [min(speeds) / speed for speed in speeds]


def _is_on_the_way(peer: PeerView, stage: int, num_stages: int) -> bool:
    if peer.record.state not in ARRIVING:
        return False
    return stage in peer.stages if num_stages > 1 else peer.record.role == "trainer"


def _risk(number: int, num_stages: int, hosts: Sequence[PeerView]) -> str:
    if len(hosts) > 1:
        return ""
    if num_stages == 1:
        if not hosts:
            return "nobody trains: the swarm stands still"
        return f"only {hosts[0].name} holds the model: losing it loses all since its last checkpoint"
    if not hosts:
        return f"stage {number} has no host: training waits"
    return f"stage {number} has one host, {hosts[0].name}: losing it stops training"


# --- coverage: compact enough for templates and scripts ---------------------------------------------------------------


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
