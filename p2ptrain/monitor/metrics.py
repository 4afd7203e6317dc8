"""A snapshot as Prometheus metrics, with base units and few labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from p2ptrain.node.reports.metrics_page import serving_families
from p2ptrain.status.views import Snapshot

CONTENT_TYPE = CONTENT_TYPE_LATEST
MAX_LABELLED_PEERS = 500
"""Largest swarm with per-peer series; more would overload most Prometheus servers."""
HEALTHS = ("healthy", "degraded", "stopped", "empty")


def exposition(snapshot: Snapshot) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(snapshot))
    return generate_latest(registry)


class _Families:
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        yield from _of_the_swarm(self._snapshot)
        yield from _of_rounds(self._snapshot)
        yield from _of_stages(self._snapshot)
        yield from _of_serving(self._snapshot)
        if len(self._snapshot.peers) <= MAX_LABELLED_PEERS:
            yield from _of_peers(self._snapshot)


def _gauge(name: str, text: str, value: float | None) -> Iterator[Metric]:
    if value is not None:
        yield GaugeMetricFamily(f"p2ptrain_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Iterator[Metric]:
    yield CounterMetricFamily(f"p2ptrain_{name}", text, value=value)


def _of_the_swarm(snapshot: Snapshot) -> Iterator[Metric]:
    headline = snapshot.headline
    health = GaugeMetricFamily("p2ptrain_health", "1 for what the swarm is, 0 for the rest", labels=["health"])
    for name in HEALTHS:
        health.add_metric([name], float(name == headline.health))
    yield health
    peers = GaugeMetricFamily("p2ptrain_peers", "Peers with a record, by role and state", labels=["role", "state"])
    for (role, state), count in sorted(
        Counter((peer.record.role, peer.record.state) for peer in snapshot.peers).items()
    ):
        peers.add_metric([role, state], count)
    yield peers
    yield from _gauge("loss", "Median training loss in nats", headline.loss)
    yield from _gauge("tokens_per_second", "Tokens in committed rounds", headline.tokens_per_second)
    yield from _gauge("bytes_per_token", "Bytes sent by a peer for each of its tokens", headline.bytes_per_token)
    alerts = GaugeMetricFamily("p2ptrain_alerts", "Alerts that hold, by rule and severity", labels=["rule", "severity"])
    for (rule, severity), count in sorted(Counter((each.rule, each.severity) for each in snapshot.alerts).items()):
        alerts.add_metric([rule, severity], count)
    yield alerts
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
    phases = GaugeMetricFamily(
        "p2ptrain_round_phase_seconds", "What the last committed round took, by phase", labels=["phase"]
    )
    for phase in ("compute", "matchmaking", "transfer"):
        phases.add_metric([phase], getattr(last, f"{phase}_seconds"))
    yield phases
    yield from _gauge("round_members", "Peers in the last committed round", last.members)
    yield from _gauge("round_contributors", "Peers whose work counts in it", last.contributors)


def _of_stages(snapshot: Snapshot) -> Iterator[Metric]:
    hosts = GaugeMetricFamily("p2ptrain_stage_hosts", "Peers that host a stage", labels=["stage"])
    syncing = GaugeMetricFamily("p2ptrain_stage_syncing", "Peers that are about to host a stage", labels=["stage"])
    speed = GaugeMetricFamily(
        "p2ptrain_stage_tokens_per_second", "What all hosts of a stage can do together", labels=["stage"]
    )
    for stage in snapshot.stages:
        hosts.add_metric([str(stage.number)], len(stage.hosts))
        syncing.add_metric([str(stage.number)], len(stage.syncing))
        speed.add_metric([str(stage.number)], stage.tokens_per_second)
    yield from (hosts, syncing, speed)
    if len(snapshot.stages) == 1:
        return
    waiting = GaugeMetricFamily("p2ptrain_stage_waiting_passes", "In the queues of a stage's hosts", labels=["stage"])
    load = GaugeMetricFamily(
        "p2ptrain_stage_load_ratio", "Speed of the slowest stage by that of this one: 1 for that", labels=["stage"]
    )
    for stage in snapshot.stages:
        waiting.add_metric([str(stage.number)], stage.waiting)
        if stage.load is not None:
            load.add_metric([str(stage.number)], stage.load)
    yield from (waiting, load)


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
