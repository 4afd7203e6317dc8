"""Records in, a snapshot of the swarm out: pure functions, so that any swarm can be had in a test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from p2ptrain.network.records.record import PeerRecord, StageReport
from p2ptrain.status.alerts import Facts, find_alerts
from p2ptrain.status.headline import headline
from p2ptrain.status.serving import NOTHING, Served, served_view, serving_view
from p2ptrain.status.stages import WHOLE, joined, reports_of, stage_views, standings
from p2ptrain.status.views import Alert, GroupView, HostedView, PeerView, RoundView, Snapshot, SwarmView

EMPTY = bytes(32)
RECENT_ROUNDS = 5
"""Rounds of each peer that decide whether rounds fail; records hold 8."""
Place = tuple[int, bytes, int]
"""A stage, a lineage, a round: who stands there holds what all others hold who do."""


@dataclass(frozen=True)
class Sighting:
    """A peer's record and when it was published, in seconds since the epoch."""

    record: PeerRecord
    at: float


@dataclass(frozen=True)
class Rates:
    """How much a peer sends and receives, in bytes per second, and how many tokens per second it generates."""

    sent: float = 0.0
    received: float = 0.0
    served: float = 0.0


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
        served: What all peers served.
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
    served: Served = NOTHING


def build_snapshot(seen: Observation, now: float) -> Snapshot:
    """The swarm at ``now``, in seconds since the epoch."""
    peers = peer_views(seen.sightings, seen.rates, seen.swarm.spans, now)
    stages = stage_views(seen.swarm.spans, peers)
    alerts: Sequence[Alert] = find_alerts(peers, stages, seen.rounds, seen.facts, now)
    return Snapshot(
        at=now,
        swarm=seen.swarm,
        headline=headline(peers, stages, seen.rounds, alerts, seen.tokens_per_second, seen.committed, seen.aborted),
        alerts=tuple(alerts),
        stages=tuple(stages),
        peers=tuple(peers),
        rounds=tuple(seen.rounds),
        groups=tuple(seen.groups),
        serving=serving_view([each.record for each in seen.sightings], seen.served),
        rejected=seen.rejected,
        directory_answers=seen.directory_answers,
    )


def peer_views(
    sightings: Sequence[Sighting], rates: Mapping[str, Rates], spans: Sequence[tuple[int, int]], now: float
) -> list[PeerView]:
    """One view for each peer, ordered by name, then id.

    Args:
        sightings: Of each peer one.
        rates: By peer id; what is missing counts as 0.
        spans: By stage: its first block and the one after its last; one where the model is not cut.
        now: Wall-clock second.
    """
    usual = usual_digests([each.record for each in sightings], len(spans))
    views = [_peer_view(each, rates.get(each.record.peer, Rates()), usual, spans, now) for each in sightings]
    return sorted(views, key=lambda view: (view.name.casefold(), view.peer))


def usual_digests(records: Sequence[PeerRecord], num_stages: int = 1) -> dict[Place, bytes]:
    """By stage, lineage and round: the state digest of most peers that report one, where at least two do."""
    reported: dict[Place, Counter[bytes]] = {}
    for record in records:
        for unit, round_, lineage, digest, _ in standings(record, num_stages):
            if digest != EMPTY:
                reported.setdefault((unit, lineage, round_), Counter())[digest] += 1
    # Of as many, the smaller digest: the same for everybody who looks.
    return {
        place: min(digests, key=lambda digest: (-digests[digest], digest))
        for place, digests in reported.items()
        if digests.total() > 1
    }


def _peer_view(
    seen: Sighting, rates: Rates, usual: Mapping[Place, bytes], spans: Sequence[tuple[int, int]], now: float
) -> PeerView:
    record, num_stages = seen.record, len(spans)
    has_state = record.digest != EMPTY
    hosting = [_hosted_view(each, usual, spans) for each in reports_of(record, num_stages)]
    if num_stages > 1:
        blocks = [each.blocks for each in hosting if each.unit < num_stages and each.digest]
        held = joined([(low, high) for low, high in blocks if low < high])
        agreements = {each.agrees for each in hosting} - {None}
    else:
        held = tuple(spans) if record.role == "trainer" and has_state else ()
        place = (WHOLE, record.lineage, record.round)
        agreements = {record.digest == usual[place]} if has_state and place in usual else set()
    last = record.last_rounds[-1] if record.last_rounds else None
    recent = record.last_rounds[-RECENT_ROUNDS:]
    failures = Counter(report.reason for report in recent if not report.committed)
    return PeerView(
        peer=record.peer,
        name=record.name or record.peer[-8:],
        role=record.role,
        state=record.state,
        device=record.device,
        version=record.version,
        protocol=record.protocol,
        reachability=record.reachability,
        blocks=(held[0][0], held[-1][1]) if held else (0, 0),
        spans=held,
        stages=tuple(each.unit for each in hosting if each.unit < num_stages),
        hosting=tuple(hosting),
        round=record.round,
        digest=record.digest.hex() if has_state else "",
        lineage=record.lineage.hex() if has_state else "",
        agrees=all(agreements) if agreements else None,
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
        recent_rounds=len(recent),
        failed_rounds=failures.total(),
        failed_reason=min(failures, key=lambda reason: (-failures[reason], reason), default=""),
        serving=served_view(record.serving) if record.serving is not None else None,
        served_per_second=rates.served if record.serving is not None else None,
    )


def _hosted_view(report: StageReport, usual: Mapping[Place, bytes], spans: Sequence[tuple[int, int]]) -> HostedView:
    has_state = report.digest != EMPTY
    expected = usual.get((report.unit, report.lineage, report.round)) if has_state else None
    return HostedView(
        unit=report.unit,
        blocks=spans[report.unit] if report.unit < len(spans) else (0, 0),
        round=report.round,
        digest=report.digest.hex() if has_state else "",
        lineage=report.lineage.hex() if has_state else "",
        agrees=None if expected is None else report.digest == expected,
        tokens_per_second=report.tokens_per_second,
        waiting=report.waiting,
        samples=report.samples,
    )
