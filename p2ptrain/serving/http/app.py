"""The web application: OpenAI's endpoints over a generator, health, metrics, and a page to chat with."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import TypeVar

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from p2ptrain.errors import DeadlineError, P2PTrainError, TemporaryError
from p2ptrain.serving.errors import OverloadedError
from p2ptrain.serving.generation import Generator
from p2ptrain.serving.http.answers import Form
from p2ptrain.serving.http.generating import Generating
from p2ptrain.serving.http.keys import Client, Keys
from p2ptrain.serving.http.metrics import Counted
from p2ptrain.serving.http.openapi import document
from p2ptrain.serving.http.preparing import Limits, Preparing
from p2ptrain.serving.http.problems import RequestError, answer_of, refusal
from p2ptrain.serving.http.schemas import (
    ChatRequest,
    CompletionRequest,
    Health,
    Model,
    ModelList,
    ResponseRequest,
    Settings,
    read,
)
from p2ptrain.serving.http.streaming import EventStream, Patience, while_connected

logger = logging.getLogger(__name__)

BODY_SECONDS = 4.5
"""Timeout of a request's body; < the server's for a request less its keep-alive, so that the client gets an answer."""
DISCARDED_BODIES = 16
"""A body that is too long is read on up to so many times its bound, so that the client sees the answer."""
END_SECONDS = 5.0
"""How long the generator may take to end generations that are cancelled."""
MAX_NAME_CHARS = 256
PROBE_SECONDS = 10.0
"""Timeout of a probe's token; > a failover."""
PROBED_SECONDS = 10.0
"""How long ``/health`` repeats the result of a probe."""
STATIC = Path(__file__).parent / "static"

R = TypeVar("R", bound=Settings)


class Api:
    """The endpoints."""

    def __init__(
        self, generator: Generator, generating: Generating, preparing: Preparing, keys: Keys, limits: Limits
    ) -> None:
        self._generator = generator
        self._generating = generating
        self._preparing = preparing
        self._keys = keys
        self._limits = limits
        self._open = 0
        self._probing = asyncio.Lock()
        self._probed: tuple[float, P2PTrainError | None] | None = None
        self._created = int(time.time())
        self._stopping = asyncio.Event()
        self._patience = Patience(limits.request_seconds, self._stopping)
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def app(self) -> ASGIApp:
        """Return the web application."""
        routes = [
            Route("/", self._page),
            Route("/health", self._health),
            Route("/metrics", self._exposition),
            Route("/openapi.json", self._document),
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._one_model),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._completion, methods=["POST"]),
            Route("/v1/responses", self._response, methods=["POST"]),
        ]
        static = Mount("/static", StaticFiles(directory=STATIC))
        explain = {HTTPException: _explain, P2PTrainError: _explain}
        counted = Middleware(Counted, metrics=self._generating.metrics, paths={route.path for route in routes})
        return Starlette(routes=[*routes, static], middleware=[counted], exception_handlers=explain)

    async def drain(self) -> None:
        """Refuse further requests, and wait for those in progress; end them after ``drain_seconds``."""
        self._is_draining = True
        if self._open:
            logger.info("stopping: %d generations in progress have %g s", self._open, self._limits.drain_seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.drain_seconds):
                await self._idle.wait()
        self._stopping.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self._idle.wait()

    # --- generations ----------------------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest, self._preparing.chat)

    async def _completion(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest, self._preparing.completion)

    async def _response(self, request: Request) -> Response:
        return await self._generate(request, ResponseRequest, self._preparing.response)

    async def _generate(
        self, request: Request, schema: type[R], prepare: Callable[[R, float], Awaitable[Form]]
    ) -> Response:
        arrived = asyncio.get_running_loop().time()
        client = self._client(request)
        client.check()
        self._check_room(1)
        _check_type(request)
        body = read(schema, await _read_body(request, self._limits.body_bytes))
        form = await prepare(body, arrived)
        if body.stream:
            return EventStream(self._events(form, client), form.end, self._patience)
        work = self._patience.bound(self._whole(form, client))
        return _json(await while_connected(request.receive, work))

    async def _events(self, form: Form, client: Client) -> AsyncGenerator[msgspec.Struct, None]:
        with self._room(form.request.num_choices, client):
            async with aclosing(self._generating.pieces(form.request, client)) as pieces:
                async for piece in pieces:
                    for event in form.events(piece):
                        yield event
            for event in form.last_events():
                yield event

    async def _whole(self, form: Form, client: Client) -> msgspec.Struct:
        with self._room(form.request.num_choices, client):
            async with aclosing(self._generating.pieces(form.request, client)) as pieces:
                return form.whole([piece async for piece in pieces])

    @contextlib.contextmanager
    def _room(self, num_choices: int, client: Client) -> Iterator[None]:
        """Count a request's generations during the block; raise `OverloadedError` if they exceed a bound."""
        self._check_room(num_choices)
        with client.requesting():
            self._open += num_choices
            self._idle.clear()
            try:
                yield
            finally:
                self._open -= num_choices
                if not self._open:
                    self._idle.set()

    def _check_room(self, num_choices: int) -> None:
        if self._is_draining:
            raise TemporaryError("the server is stopping: ask another one, or try again later")
        if self._open + num_choices > self._limits.generations:
            text = f"the server has {self._open} of {self._limits.generations} generations in progress: try again later"
            raise OverloadedError(1.0, text)

    def _client(self, request: Request) -> Client:
        return self._keys.client(request.headers.get("authorization", ""))

    # --- models ---------------------------------------------------------------------------------------------------

    async def _models(self, request: Request) -> Response:
        self._client(request)
        return _json(ModelList(data=[self._model()]))

    async def _one_model(self, request: Request) -> Response:
        self._client(request)
        name, model = request.path_params["model"], self._model()
        if name != model.id:
            text = f"model: {name[:MAX_NAME_CHARS]!r} is not served here: ask for {model.id!r}"
            raise RequestError(404, text, "model", "model_not_found")
        return _json(model)

    def _model(self) -> Model:
        served = self._generator
        return Model(id=served.model, created=self._created, max_model_len=served.context)

    # --- for people and machines ----------------------------------------------------------------------------------

    async def _page(self, request: Request) -> Response:
        return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})

    async def _document(self, request: Request) -> Response:
        return Response(msgspec.json.encode(document()), media_type="application/json")

    async def _exposition(self, request: Request) -> Response:
        return Response(self._generating.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    async def _health(self, request: Request) -> Response:
        if self._is_draining:
            raise TemporaryError("the server is stopping")
        async with self._probing:  # One probe answers all that ask meanwhile.
            now = asyncio.get_running_loop().time()
            if self._probed is None or now - self._probed[0] >= PROBED_SECONDS:
                failure: P2PTrainError | None = None
                try:
                    await Patience(PROBE_SECONDS, self._stopping).bound(self._generator.probe())
                except DeadlineError:
                    failure = TemporaryError(f"a probe failed: no token came within {PROBE_SECONDS:g} s")
                except P2PTrainError as error:
                    failure = TemporaryError(f"a probe failed: {error}")
                self._probed = (now, failure)
            if self._probed[1] is not None:
                raise self._probed[1]
        return _json(Health("ok"))


def _check_type(request: Request) -> None:
    """Raise `RequestError` unless the body is JSON: pages of other sites cannot send that without a permission."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(415, "content-type: send 'Content-Type: application/json'", "content-type")


async def _read_body(request: Request, most: int) -> bytes:
    """Return the body; raise `RequestError` if it has more than ``most`` bytes (413) or comes too slowly (408)."""
    chunks, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= most:
                    chunks.append(chunk)
                elif size > DISCARDED_BODIES * most:
                    break
    except TimeoutError as error:
        text = f"the body did not come within {BODY_SECONDS:g} s"
        raise RequestError(408, text, code="timeout", headers={"connection": "close"}) from error
    if size > most:
        text = f"the body has more than {most} bytes"
        raise RequestError(413, text, code="body_too_large", headers={"connection": "close"})
    return b"".join(chunks)


def _json(value: msgspec.Struct) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(msgspec.json.encode(value), media_type="application/json", headers=headers)


async def _explain(request: Request, error: Exception) -> Response:
    return answer_of(refusal(error))
