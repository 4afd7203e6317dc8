"""A web server on the caller's event loop; it installs no signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import uvicorn

from p2ptrain.errors import ResourceError
from p2ptrain.tasks import Tasks

if TYPE_CHECKING:
    from starlette.types import ASGIApp

DRAIN_SECONDS = 3
MAX_CONNECTIONS = 1024
START_SECONDS = 10.0


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.answers = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.answers.set()


def listen(host: str, port: int, option: str) -> socket.socket:
    """Return a listening TCP socket; port 0 takes a free one.

    Raises `ResourceError`, which names ``option``, if the port is taken or not allowed.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ResourceError(f"cannot serve at {host} port {port} ({reason}): choose another {option}") from error


def url_of(listener: socket.socket) -> str:
    """Return the HTTP URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, listener: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
    """Serve ``app`` while the body runs; yield the server's task, which ends early only if the server fails."""
    config = uvicorn.Config(
        app, lifespan="off", log_config=None, access_log=False, server_header=False,
        timeout_graceful_shutdown=DRAIN_SECONDS, limit_concurrency=MAX_CONNECTIONS,
    )  # fmt: skip
    with listener:
        server = _Server(config)
        tasks = Tasks()
        task = tasks.start(server.serve([listener]), "web")
        try:
            async with asyncio.timeout(START_SECONDS):
                await server.answers.wait()
            yield task
        finally:
            server.should_exit = True
            await tasks.join()
