"""A web server on the caller's event loop; it installs no signal handlers.

Every web server of the package runs here. Its bounds, timeouts and headers hold slow, greedy and foreign clients off.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Collection, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvicorn
from starlette.responses import PlainTextResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from p2ptrain.errors import ResourceError
from p2ptrain.tasks import Tasks

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

DRAIN_SECONDS = 3
MAX_CONNECTIONS = 512
"""Open connections; with the rest of a peer's files < 1024, the usual limit of a process."""
MAX_ADDRESS_CONNECTIONS = MAX_CONNECTIONS // 2
"""Open connections of one address, so that no single one locks the others out."""
KEEP_ALIVE_SECONDS = 15
"""Timeout of an idle connection; > 5 s, after which clients such as httpx take a new one. At the same time, a client
could send a request while the server closes."""
REQUEST_SECONDS = 20.0
"""Timeout of a request, from the connection's or the last answer's end to the body's last byte."""
READ_SECONDS = 60.0
"""Timeout of a client that does not read: `SEND_BYTES` and uvicorn's 64 KiB of an answer wait for it."""
SEND_BYTES = 1 << 18
"""The kernel's send buffer of a connection; by default the kernel lets it grow to megabytes."""
START_SECONDS = 10.0
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "manifest-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class Guard:
    """An application that answers only under known host names, and adds `HEADERS` to each answer.

    A page elsewhere can let its own name lead to this server (DNS rebinding), and so read the answers as its own. IP
    addresses, ``localhost`` and the operator's names cannot be led astray.
    """

    def __init__(self, app: ASGIApp, names: Collection[str] = ()) -> None:
        self._app = app
        self._names = {"localhost", *(name.lower() for name in names)}
        self._headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *self._headers]
            await send(message)

        name = host_name(dict(scope["headers"]).get(b"host", b"").decode("latin-1"))
        known = name in self._names or _is_address(name)
        await (self._app if known else _refuse(name))(scope, receive, send_with_headers)


def _refuse(name: str) -> ASGIApp:
    shown = repr(name[:80])
    text = f"unknown host {shown}: ask by IP address or as localhost, or start the server with --host-name {shown}\n"
    return PlainTextResponse(text, 421, {"connection": "close"})


def host_name(host: str) -> str:
    """Return the name or IP address in a ``Host`` header, in lower case and without port; empty if there is none."""
    try:
        return (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def client_network(client: tuple[str, int] | None) -> str:
    """Return what all addresses of one client share: an IPv4 address, or the first 64 bits of an IPv6 address."""
    address = client[0] if client is not None else ""
    return str(ipaddress.ip_interface(f"{address.partition('%')[0]}/64").network) if ":" in address else address


class _Connection(H11Protocol):
    """A connection that ends when it is one too many, or when its client keeps the server waiting."""

    _network = ""
    _awaited = ""
    """The client's turn: to send the ``request``, or to ``read`` the answer; empty if it is the application's turn."""
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._network = client_network(self.client)
        near = sum(isinstance(each, _Connection) and each._network == self._network for each in self.connections)
        if len(self.connections) > MAX_CONNECTIONS or near > MAX_ADDRESS_CONNECTIONS:
            self.connections.discard(self)
            transport.abort()
        self._watch_client()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._deadline is not None:
            self._deadline.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_client()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_client()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_client()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch_client()

    def _watch_client(self) -> None:
        """Start a timeout when it becomes the client's turn; single bytes of a request do not restart it."""
        awaited = "read" if self.flow.write_paused else ""
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            awaited = awaited or "request"
        if awaited == self._awaited:
            return
        self._awaited = awaited
        if self._deadline is not None:
            self._deadline.cancel()
        # Not `close`, which waits for a client that does not read.
        seconds = READ_SECONDS if awaited == "read" else REQUEST_SECONDS
        self._deadline = self.loop.call_later(seconds, self.transport.abort) if awaited else None


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
        listener = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ResourceError(f"cannot serve at {host} port {port} ({reason}): choose another {option}") from error
    # Accepted connections inherit these. asyncio itself sets TCP_NODELAY only if the socket's protocol is not 0.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the HTTP URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp, listener: socket.socket, names: Collection[str] = (), tls: tuple[str, str] | None = None
) -> AsyncIterator[asyncio.Task[None]]:
    """Serve ``app`` while the body runs, under IP addresses, ``localhost`` and ``names``.

    ``tls`` are the files of a certificate and its key (PEM). Then the bounds hold from the end of a handshake on;
    asyncio ends one that takes 60 s. Yields the server's task, which ends early only if the server fails.
    """
    certificate, key = tls or (None, None)
    config = uvicorn.Config(
        Guard(app, names), http=_Connection, ws="none", lifespan="off", log_config=None, log_level="error",
        access_log=False, server_header=False, proxy_headers=False, timeout_graceful_shutdown=2 * DRAIN_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS, ssl_certfile=certificate, ssl_keyfile=key,
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
            await asyncio.wait({task}, timeout=DRAIN_SECONDS)
            for connection in server.server_state.connections:  # An endless stream, whose task uvicorn would cancel.
                connection.transport.abort()
            await tasks.join()
