"""A reader of the page's stream of changes, which can leave: httpx's transport waits for the end of an answer."""

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message, Scope


class Reader:
    """A browser that follows the stream, one event after the other."""

    def __init__(self, app: ASGIApp, address: str = "127.0.0.1") -> None:
        self._app = app
        self._address = address
        self._sent: asyncio.Queue[Message] = asyncio.Queue()
        self._gone = asyncio.Event()
        self._asked = False
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        scope: Scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "GET",
            "scheme": "http", "path": "/api/v1/stream", "raw_path": b"/api/v1/stream", "query_string": b"",
            "root_path": "", "headers": [(b"accept-encoding", b"gzip")], "client": (self._address, 1),
            "server": ("monitor", 80),
        }  # fmt: skip
        await self._app(scope, self._receive, self._sent.put)

    async def _receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def next(self) -> Message:
        async with asyncio.timeout(30):
            return await self._sent.get()

    async def snapshot(self) -> Any:
        """What the next event tells, past what is no event."""
        while True:
            body = (await self.next()).get("body", b"")
            if body.startswith(b"event: snapshot\ndata: "):
                assert body.endswith(b"\n\n")
                assert body.count(b"\n") == 3, "data is one line"
                return json.loads(body.split(b"data: ", 1)[1])

    async def leave(self) -> None:
        self._gone.set()
        async with asyncio.timeout(30):
            await self.task
