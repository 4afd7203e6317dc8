"""A snapshot as Prometheus metrics, with base units and few labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from p2ptrain.node.reports.metrics_page import PHASES, Families, serving_families
from p2ptrain.status.views import Snapshot, StageView

MAX_LABELLED_PEERS = 500
"""Largest swarm with per-peer series; more would overload most Prometheus servers."""
HEALTHS = ("healthy", "degraded", "stopped", "empty")


def exposition(snapshot: Snapshot) -> bytes:
    return generate_latest(Families(_families_of(snapshot)))


def _families_of(snapshot: Snapshot) -> Iterator[Metric]:
    yield from _of_the_swarm(snapshot)
    yield from _of_rounds(snapshot)
    yield from _of_stages(snapshot)
    yield from _of_serving(snapshot)
    if len(snapshot.peers) <= MAX_LABELLED_PEERS:
        yield from _of_peers(snapshot)


def _gauge(name: str, text: str, value: float | None) -> Iterator[Metric]:
    if value is not None:
        yield GaugeMetricFamily(f"p2ptrain_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Iterator[Metric]:
    yield CounterMetricFamily(f"p2ptrain_{name}", text, value=value)


def _gauges(name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]) -> Metric:
    family = GaugeMetricFamily(f"p2ptrain_{name}", text, labels=labels)
    for each, value in values:
        family.add_metric(each, value)
    return family


def _of_the_swarm(snapshot: Snapshot) -> Iterator[Metric]:
    headline = snapshot.headline
    is_health = (([name], float(name == headline.health)) for name in HEALTHS)
    yield _gauges("health", "1 for what the swarm is, 0 for the rest", ["health"], is_health)
    peers = Counter((peer.record.role, peer.record.state) for peer in snapshot.peers)
    yield _gauges("peers", "Peers with a record, by role and state", ["role", "state"], sorted(peers.items()))
    yield from _gauge("loss", "Median training loss in nats", headline.loss)
    yield from _gauge("tokens_per_second", "Tokens in committed rounds", headline.tokens_per_second)
    yield from _gauge("bytes_per_token", "Bytes sent by a peer for each of its tokens", headline.bytes_per_token)
    alerts = Counter((each.rule, each.severity) for each in snapshot.alerts)
    yield _gauges("alerts", "Alerts that hold, by rule and severity", ["rule", "severity"], sorted(alerts.items()))
    yield from _counter("records_rejected", "Records dropped for what they say", snapshot.rejected)
    yield from _gauge("directory_up", "Whether the swarm's directory answers", float(snapshot.directory_answers))
    yield from _gauge("snapshot_timestamp_seconds", "When the swarm was looked at", snapshot.at)


def _of_rounds(snapshot: Snapshot) -> Iterator[Metric]:
    headline = snapshot.headline
    yield from _gauge("round", "The round that most trainers are in", headline.round)
    yield from _counter("rounds_committed", "Rounds committed since the monitor began to watch", headline.committed)
    yield from _counter("rounds_aborted", "Rounds in which an attempt broke, since then", headline.aborted)
    yield from _gauge("round_interval_seconds", "Median time between committed rounds", headline.round_seconds)
    last = next((view for view in snapshot.rounds if view.committed), None)
    if last is None:
        return
    phases = [([phase], getattr(last, f"{phase}_seconds")) for phase in PHASES]
    yield _gauges("round_phase_seconds", "What the last committed round took, by phase", ["phase"], phases)
    yield from _gauge("round_members", "Peers in the last committed round", last.members)
    yield from _gauge("round_contributors", "Peers whose work counts in it", last.contributors)


def _of_stages(snapshot: Snapshot) -> Iterator[Metric]:
    def of_each(name: str, text: str, value_of: Callable[[StageView], float | None]) -> Metric:
        values = ((str(stage.number), value_of(stage)) for stage in snapshot.stages)
        return _gauges(name, text, ["stage"], (([stage], value) for stage, value in values if value is not None))

    speed = "What all hosts of a stage can do together"
    yield of_each("stage_hosts", "Peers that host a stage", lambda stage: len(stage.hosts))
    yield of_each("stage_syncing", "Peers that are about to host a stage", lambda stage: len(stage.syncing))
    yield of_each("stage_tokens_per_second", speed, lambda stage: stage.tokens_per_second)
    if len(snapshot.stages) > 1:
        load = "Speed of the slowest stage by that of this one: 1 for that"
        yield of_each("stage_waiting_passes", "In the queues of a stage's hosts", lambda stage: stage.waiting)
        yield of_each("stage_load_ratio", load, lambda stage: stage.load)


def _of_serving(snapshot: Snapshot) -> Iterator[Metric]:
    serving = snapshot.serving
    yield from _gauge("serving_peers", "Peers that serve", serving.peers)
    yield from serving_families("p2ptrain_serving", serving.sessions, serving.totals)


def _of_peers(snapshot: Snapshot) -> Iterator[Metric]:
    labels = ["peer", "name"]
    sent = CounterMetricFamily("p2ptrain_peer_sent_bytes", "Sent by a peer since it started", labels=labels)
    received = CounterMetricFamily("p2ptrain_peer_received_bytes", "Received by a peer", labels=labels)
    tokens = CounterMetricFamily("p2ptrain_peer_tokens", "Tokens of a peer in committed rounds", labels=labels)
    speed = GaugeMetricFamily("p2ptrain_peer_tokens_per_second", "At which a peer trains", labels=labels)
    seen = GaugeMetricFamily("p2ptrain_peer_last_seen_timestamp_seconds", "When its record was made", labels=labels)
    generated = CounterMetricFamily("p2ptrain_peer_served_tokens", "Tokens that a peer generated", labels=labels)
    for peer in snapshot.peers:
        record, who = peer.record, [peer.record.peer, peer.name]
        if record.serving is not None:
            generated.add_metric(who, record.serving.totals.generated_tokens)
        sent.add_metric(who, record.bytes_sent)
        received.add_metric(who, record.bytes_received)
        tokens.add_metric(who, record.trained_tokens)
        speed.add_metric(who, record.tokens_per_second)
        seen.add_metric(who, peer.last_seen)
    yield from (sent, received, tokens, generated, speed, seen)
