"""Counters of one server, in Prometheus' form, and the layer that counts its answers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from p2ptrain.network.records.serving import BOUNDS
from p2ptrain.serving.generation import Generator, Load
from p2ptrain.serving.http.problems import answer_of, refusal

CLIENT_LEFT = 499
"""Status code of a request whose client left."""
BUCKETS = BOUNDS[::2]
"""Four bounds per decade, in seconds."""


class Metrics:
    """The counters, histograms and gauges of one server."""

    def __init__(self, generator: Generator) -> None:
        """``generator`` tells of audits and hosts."""
        self._registry = registry = CollectorRegistry()
        prefix = "p2ptrain_http"
        self.requests = Counter(
            f"{prefix}_requests", "Requests that ended, by path and status code", ["path", "code"], registry=registry
        )
        self.prompt_tokens = Counter(f"{prefix}_prompt_tokens", "Tokens of prompts", registry=registry)
        self.cached_tokens = Counter(
            f"{prefix}_cached_prompt_tokens", "Those of them that a host had computed before", registry=registry
        )
        self.prefix_hits = Counter(f"{prefix}_prefix_hits", "Prompts with such tokens", registry=registry)
        self.generated_tokens = Counter(f"{prefix}_generated_tokens", "Tokens generated", registry=registry)
        self.cancelled = Counter(
            f"{prefix}_cancelled_requests", "Requests whose client left before their end", registry=registry
        )
        self.generations = Gauge(f"{prefix}_generations", "Generations in progress", registry=registry)
        self.waiting = Gauge(f"{prefix}_waiting_generations", "Those of them without a token so far", registry=registry)
        self.first_token = Histogram(
            f"{prefix}_time_to_first_token_seconds", "From a request's arrival to a generation's first token",
            registry=registry, buckets=BUCKETS,
        )  # fmt: skip
        self.token = Histogram(
            f"{prefix}_time_per_output_token_seconds", "From one token of a generation to the next",
            registry=registry, buckets=BUCKETS,
        )  # fmt: skip

        self._generator = generator
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield what is counted elsewhere: audits, and by the hosts' records their pages and drafts."""
        family = CounterMetricFamily("p2ptrain_http_audits", "Answers generated again on other hosts, by result",
                                     labels=["result"])  # fmt: skip
        for result, number in self._generator.audits.items():
            family.add_metric([result], number)
        yield family
        for name in Load._fields:
            gauge = GaugeMetricFamily(f"p2ptrain_http_hosts_{name}", "Told by the hosts of a stage", labels=["stage"])
            for stage, load in enumerate(self._generator.loads):
                gauge.add_metric([str(stage)], getattr(load, name))
            yield gauge

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


class Counted:
    """Counts answers by path and code, gives each an id, and explains errors."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: set[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        code = 0

        async def counted(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", f"req-{uuid.uuid4().hex}".encode())]
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except ClientDisconnect:
            code = CLIENT_LEFT
            self._metrics.cancelled.inc()
        except Exception as error:
            if code:  # The answer has begun: the server logs the error, and ends the connection.
                raise
            await answer_of(refusal(error))(scope, receive, counted)
        finally:
            self._metrics.requests.labels(self._label(scope["path"]), str(code)).inc()

    def _label(self, path: str) -> str:
        """Return a path of the application, so that clients cannot make up labels."""
        if path.startswith("/v1/models/"):
            return "/v1/models/{model}"
        return path if path in self._paths else "other"
