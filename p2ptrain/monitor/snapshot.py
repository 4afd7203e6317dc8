"""Records in, a snapshot of the swarm out: pure functions, so that any swarm can be had in a test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from p2ptrain.monitor.alerts import Facts, find_alerts
from p2ptrain.monitor.headline import headline
from p2ptrain.monitor.views import Alert, GroupView, PeerView, RoundView, Snapshot, StageView, SwarmView
from p2ptrain.network.records import PeerRecord

HOSTING = ("training", "serving", "paused")
ARRIVING = ("starting", "syncing")
EMPTY = bytes(32)


@dataclass(frozen=True)
class Sighting:
    """A peer's record and when it was published, in seconds since the epoch."""

    record: PeerRecord
    at: float


@dataclass(frozen=True)
class Rates:
    """How much a peer sends and receives, in bytes per second."""

    sent: float = 0.0
    received: float = 0.0


@dataclass(frozen=True)
class Observation:
    """All that a snapshot is made of.

    Attributes:
        sightings: The newest record of each peer.
        rates: By peer id; what is missing counts as 0.
        rounds: Newest first.
        tokens_per_second: Of the swarm, in committed rounds.
        committed, aborted: Rounds since the monitor began to watch.
        facts: What takes more than one look to know.
    """

    swarm: SwarmView
    sightings: Sequence[Sighting]
    rates: Mapping[str, Rates]
    rounds: Sequence[RoundView]
    groups: Sequence[GroupView]
    tokens_per_second: float | None
    committed: int
    aborted: int
    rejected: int
    directory_answers: bool
    facts: Facts


def build_snapshot(seen: Observation, now: float) -> Snapshot:
    """The swarm at ``now``, in seconds since the epoch."""
    peers = peer_views(seen.sightings, seen.rates, seen.swarm.num_blocks, now)
    stages = stage_views([(0, seen.swarm.num_blocks)], peers)
    alerts: Sequence[Alert] = find_alerts(peers, stages, seen.rounds, seen.facts, now)
    return Snapshot(
        at=now,
        swarm=seen.swarm,
        headline=headline(peers, seen.rounds, alerts, seen.tokens_per_second, seen.committed, seen.aborted),
        alerts=tuple(alerts),
        stages=tuple(stages),
        peers=tuple(peers),
        rounds=tuple(seen.rounds),
        groups=tuple(seen.groups),
        rejected=seen.rejected,
        directory_answers=seen.directory_answers,
    )


def peer_views(
    sightings: Sequence[Sighting], rates: Mapping[str, Rates], num_blocks: int, now: float
) -> list[PeerView]:
    """One view for each peer, ordered by name, then id."""
    usual = usual_digests([each.record for each in sightings])
    views = [_peer_view(each, rates.get(each.record.peer, Rates()), usual, num_blocks, now) for each in sightings]
    return sorted(views, key=lambda view: (view.name.casefold(), view.peer))


def usual_digests(records: Sequence[PeerRecord]) -> dict[tuple[bytes, int], bytes]:
    """By lineage and round: the state digest of most peers that report one, where at least two do."""
    reported: dict[tuple[bytes, int], Counter[bytes]] = {}
    for record in records:
        if record.digest != EMPTY:
            reported.setdefault((record.lineage, record.round), Counter())[record.digest] += 1
    # Of as many, the smaller digest: the same for everybody who looks.
    return {
        place: min(digests, key=lambda digest: (-digests[digest], digest))
        for place, digests in reported.items()
        if digests.total() > 1
    }


def _peer_view(
    seen: Sighting, rates: Rates, usual: Mapping[tuple[bytes, int], bytes], num_blocks: int, now: float
) -> PeerView:
    record = seen.record
    has_state = record.digest != EMPTY
    expected = usual.get((record.lineage, record.round)) if has_state else None
    last = record.last_rounds[-1] if record.last_rounds else None
    return PeerView(
        peer=record.peer,
        name=record.name or record.peer[-8:],
        role=record.role,
        state=record.state,
        device=record.device,
        version=record.version,
        protocol=record.protocol,
        reachability=record.reachability,
        blocks=(0, num_blocks if record.role == "trainer" and has_state else 0),
        round=record.round,
        digest=record.digest.hex() if has_state else "",
        lineage=record.lineage.hex() if has_state else "",
        agrees=None if expected is None else record.digest == expected,
        loss=record.loss,
        diverged=record.diverged,
        tokens_per_second=record.tokens_per_second,
        bytes_sent=record.bytes_sent,
        bytes_received=record.bytes_received,
        sent_per_second=rates.sent,
        received_per_second=rates.received,
        trained_tokens=record.trained_tokens,
        trained_rounds=record.trained_rounds,
        hours=max(0.0, now - record.started_at) / 3600,
        started_at=record.started_at,
        last_seen=min(seen.at, now),
        clock_skew_seconds=record.clock_skew_seconds,
        direct_refusals=record.direct_refusals,
        last_reason=last.reason if last else "",
        note=record.note,
    )


def stage_views(spans: Sequence[tuple[int, int]], peers: Sequence[PeerView]) -> list[StageView]:
    """Who hosts each stage of the model, and what losing one host would break.

    Args:
        spans: By stage: its first block and the one after its last.
        peers: All of them.
    """
    hosts = [
        [peer for peer in peers if peer.blocks[0] <= low and high <= peer.blocks[1] and peer.state in HOSTING]
        for low, high in spans
    ]
    syncing = [peer.peer for peer in peers if peer.role == "trainer" and peer.state in ARRIVING]
    speeds = [sum(peer.tokens_per_second for peer in of_stage) for of_stage in hosts]
    slowest = min(speeds, default=0.0)
    return [
        StageView(
            number=number,
            blocks=span,
            hosts=tuple(peer.peer for peer in of_stage),
            syncing=tuple(syncing),
            tokens_per_second=speed,
            is_bottleneck=len(spans) > 1 and speed == slowest,
            risk=_risk(number, len(spans), of_stage),
        )
        for number, (span, of_stage, speed) in enumerate(zip(spans, hosts, speeds, strict=True))
    ]


def _risk(number: int, num_stages: int, hosts: Sequence[PeerView]) -> str:
    if len(hosts) > 1:
        return ""
    if num_stages == 1:
        if not hosts:
            return "nobody trains: the swarm stands still"
        return f"only {hosts[0].name} holds the model: losing it loses all since its last checkpoint"
    if not hosts:
        return f"stage {number} has no host: training stands still"
    return f"stage {number} has one host, {hosts[0].name}: losing it stops training"
