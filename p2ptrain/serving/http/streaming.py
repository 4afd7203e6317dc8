"""Work for a client that may leave: answers that end when their connection does, and streams of events.

uvicorn drops what is sent to a client that left, so the connection is watched beside the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from p2ptrain.errors import DeadlineError, TemporaryError
from p2ptrain.serving.http.problems import answer_of, body_of, refusal
from p2ptrain.tasks import Tasks

T = TypeVar("T")

HEARTBEAT_SECONDS = 15.0
"""Silence after which a comment keeps proxies from closing a stream."""
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the work's result; cancel it and raise `ClientDisconnect` if the client leaves first."""
    async with Tasks() as tasks:
        working, leaving = tasks.call(work, "request"), tasks.call(_left(receive), "disconnect")
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
    raise ClientDisconnect


@dataclass(frozen=True)
class Patience:
    """How long a request may take: so many seconds, and no longer than until the server stops."""

    seconds: float
    stopping: asyncio.Event

    async def bound(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the work's result; cancel it and raise `DeadlineError` or `TemporaryError` if it takes too long."""
        async with Tasks() as tasks:
            working, stopping = tasks.call(work, "work"), tasks.call(self.stopping.wait(), "stop")
            await asyncio.wait({working, stopping}, timeout=self.seconds, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            if stopping.done():
                raise TemporaryError("the server stops: ask again later")
        raise DeadlineError(f"the answer took longer than {self.seconds:g} s: ask for fewer tokens")


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events; closing the connection closes the generator behind them.

    The status waits for the first event, so that a refusal has its own code. After `HEARTBEAT_SECONDS` without one the
    stream begins, and a refusal is an event.

    Args:
        events: The events' data. The stream names an event that has a ``type``.
        end: Sent after the last event, but not after a failure.
        patience: For the whole stream.
    """

    def __init__(self, events: AsyncGenerator[msgspec.Struct, None], end: bytes, patience: Patience) -> None:
        super().__init__(headers=HEADERS, media_type="text/event-stream")
        del self.headers["content-length"]
        self._events, self._end = events, end
        self._patience = patience
        self._sending = asyncio.Lock()
        self._begun = False
        self._sent_at = asyncio.get_running_loop().time()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send_all(scope, receive, send))

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._patience.bound(self._send_events(send))
        except Exception as error:
            problem = refusal(error)
            if not self._begun:
                await answer_of(problem)(scope, receive, send)
                return
            await self._send(send, b"data: " + body_of(problem) + b"\n\n")
        else:
            await self._send(send, self._end)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        async with Tasks() as tasks, aclosing(self._events):
            tasks.start(self._beat(send), "heartbeat")
            async for event in self._events:
                kind = getattr(event, "type", "")
                name = f"event: {kind}\n".encode() if kind else b""
                await self._send(send, name + b"data: " + msgspec.json.encode(event) + b"\n\n")
                await asyncio.sleep(0)  # The event loop may learn that the client left; other streams have their turn.

    async def _beat(self, send: Send) -> None:
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(0.0, self._sent_at + HEARTBEAT_SECONDS - now()))
            if now() - self._sent_at >= HEARTBEAT_SECONDS:
                await self._send(send, b": still here\n\n")

    async def _send(self, send: Send, data: bytes) -> None:
        async with self._sending:
            self._sent_at = asyncio.get_running_loop().time()
            if not self._begun:
                self._begun = True
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": True})
