"""One peer's endpoints on loopback: Prometheus metrics of its record, and a health check."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from p2ptrain.network.http_server import listen, serving
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.network.records.serving import ServingTotals, cumulative
from p2ptrain.node.peer import Peer

PHASES = ("compute", "matchmaking", "transfer")


def serve_metrics(peer: Peer, port: int) -> AbstractAsyncContextManager[Any]:
    """Serve ``/metrics`` and ``/healthz`` of a peer on this event loop, during the block."""

    async def metrics(request: Request) -> Response:
        sync = peer.held.synchronizer
        rounds = (sync.rounds_committed, sync.rounds_aborted) if sync is not None else (0, 0)
        return Response(exposition(peer.record.describe(), rounds), media_type=CONTENT_TYPE_LATEST)

    async def health(request: Request) -> Response:
        # A bootstrap peer is healthy alone: its first peers may wait for this answer before they join.
        answers = peer.presence.directory_answers or peer.options.role == "bootstrap"
        text = f"{peer.record.state}\n" if answers else "the swarm's directory does not answer\n"
        return PlainTextResponse(text, 200 if answers else 503)

    app = Starlette(routes=[Route("/metrics", metrics), Route("/healthz", health)])
    return serving(app, listen("127.0.0.1", port, "--metrics-port"))


class Families(Collector):
    """Metric families, in the form that ``generate_latest`` takes."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def exposition(record: PeerRecord, rounds: tuple[int, int]) -> bytes:
    """Return a record and (committed, aborted) rounds in the Prometheus text format."""
    return generate_latest(Families(_families_of(record, rounds)))


def _families_of(record: PeerRecord, rounds: tuple[int, int]) -> Iterator[Metric]:
    about = InfoMetricFamily("p2ptrain_peer", "This peer")
    names = {"peer": record.peer, "name": record.name, "version": record.version, "role": record.role}
    about.add_metric([], {**names, "state": record.state, "reachability": record.reachability})
    yield about
    counts = {
        "rounds_committed": (rounds[0], "Rounds committed by this peer"),
        "rounds_aborted": (rounds[1], "Synchronisations that ended without one"),
        "tokens": (record.trained_tokens, "Tokens of this peer in committed rounds"),
        "sent_bytes": (record.bytes_sent, "Bytes sent"),
        "received_bytes": (record.bytes_received, "Bytes received"),
    }
    for name, (count, text) in counts.items():
        yield CounterMetricFamily(f"p2ptrain_peer_{name}", text, value=count)
    numbers = {
        "round": (record.round, "The round it works towards"),
        "tokens_per_second": (record.tokens_per_second, "At which it trains"),
        "start_timestamp_seconds": (record.started_at, "When it started"),
        "clock_skew_seconds": (record.clock_skew_seconds, "How far its clock is ahead of the swarm's"),
    }
    for name, (number, text) in numbers.items():
        yield GaugeMetricFamily(f"p2ptrain_peer_{name}", text, value=number)
    if record.loss is not None:
        yield GaugeMetricFamily("p2ptrain_peer_loss", "Of the last batch, in nats", value=record.loss)
    if record.last_rounds:
        last = GaugeMetricFamily("p2ptrain_peer_round_phase_seconds", "Of its last round", labels=["phase"])
        for phase in PHASES:
            last.add_metric([phase], getattr(record.last_rounds[-1], f"{phase}_seconds"))
        yield last
    if record.serving is not None:
        serving = record.serving
        yield from serving_families("p2ptrain_peer_serving", serving.sessions, serving.totals)
        if (served := serving.served) is not None:
            pages, free = "Pages of keys and values, of 64 positions", "Those of them that sessions can reserve"
            yield GaugeMetricFamily("p2ptrain_peer_serving_kv_pages", pages, value=served.pages)
            yield GaugeMetricFamily("p2ptrain_peer_serving_kv_free_pages", free, value=served.free_pages)


def serving_families(peers: str, sessions: int, totals: ServingTotals) -> Iterator[Metric]:
    """Yield serving metrics whose names begin with ``peers``."""
    yield GaugeMetricFamily(f"{peers}_sessions", "Generations that are open", value=sessions)
    for name, count, text in (
        ("requests", totals.requests, "Requests that were accepted"),
        ("failed_requests", totals.failed_requests, "Those of them that failed"),
        ("generated_tokens", totals.generated_tokens, "Tokens that were generated"),
        ("prompt_tokens", totals.prompt_tokens, "Tokens of prompts"),
        ("cached_tokens", totals.cached_tokens, "Those of them whose rows were computed before"),
        ("drafted_tokens", totals.drafted_tokens, "Tokens that the first stage drafted"),
        ("accepted_tokens", totals.accepted_tokens, "Those of them that were drawn"),
    ):
        yield CounterMetricFamily(f"{peers}_{name}", text, value=count)
    for name, latencies, text in (
        ("time_to_first_token", totals.first_token, "From a request's arrival to its first token"),
        ("time_per_output_token", totals.token, "From one token of an answer to the next"),
    ):
        buckets = cumulative(latencies.counts)
        yield HistogramMetricFamily(f"{peers}_{name}_seconds", text, buckets=buckets, sum_value=latencies.seconds)
