"""Pure functions from records to a snapshot of the swarm."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

from p2ptrain.network.records.record import PeerRecord, Sighting, StageReport
from p2ptrain.status.health import Scene, find_alerts, headline
from p2ptrain.status.observation import Observation
from p2ptrain.status.serving import percentiles, serving_view, totals_of
from p2ptrain.status.stages import TRAINING_ROLES, WHOLE, Held, joined, positions, reports_of, stage_views
from p2ptrain.status.views import HostedView, PeerView, Rates, Snapshot

Place = tuple[int, bytes, int]
"""Stage, lineage, round: all peers at one place should hold the same state."""


def build_snapshot(seen: Observation, now: float) -> Snapshot:
    """Return the swarm at ``now``, in seconds since the epoch."""
    peers = peer_views(seen.sightings, seen.rates, seen.swarm.spans, now, seen.proven)
    stages = stage_views(seen.swarm.spans, peers)
    scene = Scene(seen, peers, stages, now)
    alerts = find_alerts(scene)
    return Snapshot(
        at=now,
        swarm=seen.swarm,
        headline=headline(scene, alerts),
        alerts=tuple(alerts),
        stages=tuple(stages),
        peers=tuple(peers),
        rounds=tuple(seen.rounds),
        groups=tuple(seen.groups),
        serving=serving_view([each.record for each in seen.sightings], seen.served),
        sites=seen.sites,
        rejected=seen.rejected,
        directory_answers=seen.directory_answers,
    )


def peer_views(
    sightings: Sequence[Sighting], rates: Mapping[str, Rates], spans: Sequence[tuple[int, int]], now: float,
    proven: Collection[str] | None = None,
) -> list[PeerView]:  # fmt: skip
    """Return one view for each peer, ordered by name, then id.

    Args:
        rates: By peer id; 0 for a missing peer.
        spans: By stage: its first block and the one after its last; one span for a model that is not cut.
        now: Wall-clock second.
        proven: See `Observation`.
    """
    majority = majority_digests([each.record for each in sightings], len(spans))
    views = [_peer_view(each, rates.get(each.record.peer, Rates()), majority, spans, now, proven) for each in sightings]
    return sorted(views, key=lambda view: (view.name.casefold(), view.record.peer))


def majority_digests(records: Sequence[PeerRecord], num_stages: int = 1) -> dict[Place, bytes]:
    """Return the majority's state digest by stage, lineage and round, where at least two peers report one."""
    reported: dict[Place, Counter[bytes]] = defaultdict(Counter)
    for record in records:
        for unit, held in positions(record, num_stages):
            if any(held.digest):
                reported[unit, held.lineage, held.round][held.digest] += 1
    # The smaller digest wins a tie, so that all observers agree.
    return {
        place: min(digests, key=lambda digest: (-digests[digest], digest))
        for place, digests in reported.items()
        if digests.total() > 1
    }


def _peer_view(
    seen: Sighting, rates: Rates, majority: Mapping[Place, bytes], spans: Sequence[tuple[int, int]], now: float,
    proven: Collection[str] | None,
) -> PeerView:  # fmt: skip
    record, num_stages = seen.record, len(spans)
    hosting = [_hosted_view(each, majority, spans) for each in reports_of(record, num_stages)]
    if num_stages > 1:
        blocks = [each.blocks for each in hosting if each.report.unit < num_stages and any(each.report.digest)]
        held = joined([(low, high) for low, high in blocks if low < high])
        agreements = {each.agrees for each in hosting} - {None}
    else:
        held = tuple(spans) if record.role == "trainer" and any(record.digest) else ()
        agreements = {_agrees(record, WHOLE, majority)} - {None}
    totals = totals_of(record)
    return PeerView(
        record=record,
        name=record.label,
        last_seen=min(seen.at, now),
        rates=rates,
        spans=held,
        stages=tuple(each.report.unit for each in hosting if each.report.unit < num_stages),
        hosting=tuple(hosting),
        agrees=all(agreements) if agreements else None,
        proven=record.peer in proven if proven is not None and record.role in TRAINING_ROLES else None,
        first_token=percentiles(totals.first_token),
        token=percentiles(totals.token),
    )


def _hosted_view(report: StageReport, majority: Mapping[Place, bytes], spans: Sequence[tuple[int, int]]) -> HostedView:
    blocks = spans[report.unit] if report.unit < len(spans) else (0, 0)
    return HostedView(report, blocks, _agrees(report, report.unit, majority))


def _agrees(held: Held, unit: int, majority: Mapping[Place, bytes]) -> bool | None:
    expected = majority.get((unit, held.lineage, held.round)) if any(held.digest) else None
    return None if expected is None else held.digest == expected
