"""The web application: pages, JSON under ``/api/v1``, a stream of changes, and metrics; read-only, without cookies.

Text of peers is untrusted: templates escape it, and scripts set it as text, never as markup. The server's
Content-Security-Policy forbids resources of other hosts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from p2ptrain.errors import ResourceError
from p2ptrain.monitor.metrics import exposition
from p2ptrain.monitor.openapi import document
from p2ptrain.monitor.pages import SHOWN_ROUNDS, Pages, matching
from p2ptrain.monitor.store import ALL_SERIES, WINDOWS, Store
from p2ptrain.monitor.watch import Watch
from p2ptrain.network.http_server import client_network
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.status.stages import coverage
from p2ptrain.status.views import PeerView, Rates, Snapshot, fields_of, plain

logger = logging.getLogger(__name__)

MAX_STREAMS = 256
MAX_ADDRESS_STREAMS = MAX_STREAMS // 2
"""Streams to one address; both limits are half of the connections, so that pages load beside them."""
HEARTBEAT_SECONDS = 15.0
MAX_LIMIT = 5_000
STALE_SECONDS = 60.0
"""Age of a snapshot from which ``/healthz`` fails."""
TABLE_COLUMNS = (
    "peer", "name", "role", "state", "round", "spans", "stages", "version", "reachability", "loss",
    "tokens_per_second", "sent_per_second", "received_per_second", "bytes_sent", "bytes_received", "trained_tokens",
    "trained_rounds", "started_at", "last_seen", "agrees", "proven", "served_per_second",
)  # fmt: skip
NO_SUCH_PEER = "no such peer is in the swarm now"
STATIC = Path(__file__).parent / "static"


def _is_ordered(kind: Any) -> bool:
    return not (isinstance(kind, type) and fields_of(kind)) and all(map(_is_ordered, get_args(kind)))


COLUMNS = {
    name: attrgetter(f"{holder}{name}")
    for holder, kind in (("record.", PeerRecord), ("rates.", Rates), ("", PeerView))
    for name, hint in fields_of(kind).items()
    if _is_ordered(hint)
}
"""Sort keys of peers, by name of a field of their views, rates and records."""
ANSWERS: Mapping[str, Callable[[Snapshot], Any]] = {
    "/snapshot": lambda snapshot: snapshot,
    "/headline": lambda snapshot: snapshot.headline,
    "/alerts": lambda snapshot: {"alerts": snapshot.alerts},
    "/stages": lambda snapshot: {"stages": snapshot.stages},
    "/groups": lambda snapshot: {"groups": snapshot.groups},
    "/serving": lambda snapshot: snapshot.serving,
    "/sites": lambda snapshot: {"sites": snapshot.sites},
    "/join": lambda snapshot: snapshot.swarm,
    "/peers/table": lambda snapshot: {
        "at": snapshot.at,
        "columns": TABLE_COLUMNS,
        "rows": [[COLUMNS[name](peer) for name in TABLE_COLUMNS] for peer in snapshot.peers],
    },
}
"""Parts of a snapshot, by path below ``/api/v1``; the answers are cached until the next snapshot."""


def make_app(watch: Watch, store: Store, now: Callable[[], float] = time.time) -> ASGIApp:
    """Return the web application; ``now`` returns wall-clock seconds of the swarm's clock."""
    web = _Web(watch, store, now)
    return Starlette(
        routes=[*web.routes(), Mount("/static", StaticFiles(directory=STATIC), name="static")],
        middleware=[Middleware(GZipMiddleware, minimum_size=2048, compresslevel=3)],
        exception_handlers={HTTPException: _explain, ResourceError: _explain_no_history},
    )


async def _explain(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if request.url.path.startswith("/api/"):
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)
    return PlainTextResponse(f"{error.detail}\n", error.status_code, error.headers)


async def _explain_no_history(request: Request, error: Exception) -> Response:
    logger.warning("%s", error)
    return await _explain(request, HTTPException(503, "history cannot be read at the moment"))


class _Web:
    def __init__(self, watch: Watch, store: Store, now: Callable[[], float]) -> None:
        self._watch = watch
        self._store = store
        self._now = now
        self._pages = Pages(store)
        self._streams: list[str] = []
        self._cached: tuple[Snapshot | None, dict[str, bytes]] = (None, {})

    def routes(self) -> list[Route]:
        api: Mapping[str, Callable[[Request], Awaitable[Response]]] = {
            "/peers": self._peers,
            "/peers/{peer}": self._peer,
            "/rounds": self._rounds,
            "/leaders": self._leaders,
            "/events": self._events,
            "/series": self._series,
            "/openapi.json": self._openapi,
            "/stream": self._stream,
        }
        return [
            Route("/", self._index),
            Route("/peers/{peer}", self._peer_page),
            Route("/metrics", self._metrics),
            Route("/healthz", self._health),
            *(Route(f"/api/v1{path}", self._answering(path, make)) for path, make in ANSWERS.items()),
            *(Route(f"/api/v1{path}", endpoint) for path, endpoint in api.items()),
        ]

    # --- pages ----------------------------------------------------------------------------------------------------

    async def _index(self, request: Request) -> Response:
        return await self._pages.index(self._now_snapshot(), request.query_params)

    async def _peer_page(self, request: Request) -> Response:
        snapshot, peer = self._now_snapshot(), self._find(request)
        gone = request.path_params["peer"]
        page = await (self._pages.peer(snapshot, peer) if peer else self._pages.departed(snapshot, gone))
        if page is None:
            raise HTTPException(404, NO_SUCH_PEER)
        return page

    # --- JSON -----------------------------------------------------------------------------------------------------

    def _now_snapshot(self) -> Snapshot:
        if self._watch.snapshot is None:
            raise HTTPException(503, "the first look at the swarm is not done yet: try again in a few seconds")
        return self._watch.snapshot

    def _made_once(self, name: str, make: Callable[[Snapshot], Any]) -> Response:
        """Return JSON that is cached until the next snapshot."""
        snapshot = self._now_snapshot()
        if self._cached[0] is not snapshot:
            self._cached = (snapshot, {})
        known = self._cached[1]
        if name not in known:
            known[name] = to_json(make(snapshot))
        return Response(known[name], media_type="application/json", headers={"cache-control": "no-cache"})

    def _answering(self, path: str, make: Callable[[Snapshot], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return self._made_once(path, make)

        return answer

    async def _peers(self, request: Request) -> Response:
        asked = request.query_params
        peers = matching(self._now_snapshot().peers, asked.get("search", ""))
        column, descending = asked.get("sort", "name").removeprefix("-"), asked.get("sort", "").startswith("-")
        if column not in COLUMNS:
            raise HTTPException(400, f"sort: there is no column {column!r}")
        peers.sort(key=lambda peer: _order(COLUMNS[column](peer)), reverse=descending)
        offset, limit = _number(asked, "offset", 0, 1 << 31), _number(asked, "limit", 200, MAX_LIMIT)
        return _json({"total": len(peers), "peers": peers[offset : offset + limit]})

    def _find(self, request: Request) -> PeerView | None:
        wanted = request.path_params["peer"]
        return next((peer for peer in self._now_snapshot().peers if peer.record.peer == wanted), None)

    async def _peer(self, request: Request) -> Response:
        if (peer := self._find(request)) is None:
            raise HTTPException(404, NO_SUCH_PEER)
        contribution = await self._store.contribution(peer.record.peer)
        return _json({**plain(peer), "contribution": contribution})

    async def _rounds(self, request: Request) -> Response:
        before = _number(request.query_params, "before", 1 << 62, 1 << 62)
        limit = _number(request.query_params, "limit", 50, 500)
        shown = [plain(view) for view in self._now_snapshot().rounds if view.round < before][:limit]
        if len(shown) < limit:
            oldest = shown[-1]["round"] if shown else before
            shown += await self._store.rounds(oldest, limit - len(shown))
        return _json({"rounds": shown})

    async def _leaders(self, request: Request) -> Response:
        limit = _number(request.query_params, "limit", 50, 1000)
        return _json({"leaders": await self._store.leaders(limit)})

    async def _events(self, request: Request) -> Response:
        since = _real(request.query_params, "since", 0.0)
        limit = _number(request.query_params, "limit", 100, 1000)
        return _json({"events": await self._store.events(since, limit)})

    async def _series(self, request: Request) -> Response:
        window = request.query_params.get("window", "hour")
        names = [name for name in request.query_params.get("names", "").split(",") if name] or list(ALL_SERIES)
        if window not in WINDOWS:
            raise HTTPException(400, f"window: choose one of {', '.join(WINDOWS)}")
        if unknown := sorted(set(names) - set(ALL_SERIES)):
            raise HTTPException(400, f"names: there is no series {unknown[0]!r}; there are {', '.join(ALL_SERIES)}")
        return _json(await self._store.series(window, names, self._now()))

    async def _openapi(self, request: Request) -> Response:
        return _json(document())

    # --- changes --------------------------------------------------------------------------------------------------

    async def _stream(self, request: Request) -> Response:
        client = client_network(request.scope.get("client"))
        if len(self._streams) >= MAX_STREAMS or self._streams.count(client) >= MAX_ADDRESS_STREAMS:
            raise HTTPException(503, "too many watch this page live: it can be loaded again by hand")
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        if request.method == "HEAD":
            return Response(headers=headers, media_type="text/event-stream")
        return _CountedStream(self._changes(request), self._streams, client, headers)

    async def _changes(self, request: Request) -> AsyncIterator[bytes]:
        yield b"retry: 3000\n\n"
        seen: Snapshot | None = None
        while not await request.is_disconnected():
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    seen = await self._watch.wait_for_change(seen)
            except TimeoutError:
                yield b": still here\n\n"
                continue
            body = self._made_once("live", _live).body
            yield b"event: snapshot\ndata: " + bytes(body) + b"\n\n"

    # --- for machines ---------------------------------------------------------------------------------------------

    async def _metrics(self, request: Request) -> Response:
        return Response(exposition(self._now_snapshot()), media_type=CONTENT_TYPE_LATEST)

    async def _health(self, request: Request) -> Response:
        snapshot = self._watch.snapshot
        if snapshot is None or self._now() - snapshot.at >= STALE_SECONDS:
            return _json({"status": "no fresh look"}, 503)
        if not snapshot.directory_answers:
            return _json({"status": "the swarm's directory does not answer"}, 503)
        return _json({"status": "ok"})


class _CountedStream(StreamingResponse):
    """A stream of events that is listed among the open ones until it ends, also if it never begins."""

    def __init__(self, content: AsyncIterator[bytes], streams: list[str], client: str, headers: dict[str, str]) -> None:
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._streams, self._client = streams, client
        streams.append(client)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.remove(self._client)


def _live(snapshot: Snapshot) -> dict[str, Any]:
    """Return the parts of a snapshot in the stream; scripts request peers and groups separately."""
    return {
        "at": snapshot.at,
        "headline": snapshot.headline,
        "alerts": snapshot.alerts,
        "coverage": coverage(snapshot),
        "rounds": snapshot.rounds[:SHOWN_ROUNDS],
        "serving": snapshot.serving,
        "rejected": snapshot.rejected,
    }


def to_json(value: Any) -> bytes:
    """Return views as compact JSON that is safe in a script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False, default=plain)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").encode()


def _json(value: Any, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json", headers={"cache-control": "no-cache"})


def _order(value: Any) -> tuple[bool, Any]:
    """Return a key that sorts text case-insensitively, and missing values first."""
    return (value is not None, value.casefold() if isinstance(value, str) else value if value is not None else 0)


def _number(asked: Mapping[str, str], name: str, default: int, most: int) -> int:
    text = asked.get(name, str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= most):
        raise HTTPException(400, f"{name}: give a whole number from 0 to {most}")
    return int(text)


def _real(asked: Mapping[str, str], name: str, default: float) -> float:
    try:
        value = float(asked.get(name, default))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise HTTPException(400, f"{name}: give a number of seconds since 1970")
    return value
