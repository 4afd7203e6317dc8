"""No client keeps the server waiting, fills its memory, takes all of its places, or asks it by a name of its own."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from p2ptrain.network import http_server
from p2ptrain.network.http_server import HEADERS, Guard, client_network, host_name, listen, serving
from tests.support.coroutines import on_loop

PATIENCE_SECONDS = 20.0
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Server:
    """A server whose stream never ends, and what it has sent."""

    def __init__(self) -> None:
        self.port = 0
        self.sent = 0
        self.ended = asyncio.Event()
        self.clients: list[asyncio.StreamWriter] = []

    def app(self) -> Starlette:
        return Starlette(routes=[
            Route("/", self._home), Route("/body", self._body, methods=["POST"]), Route("/stream", self._stream),
        ])  # fmt: skip

    async def _home(self, request: Request) -> Response:
        return PlainTextResponse("here")

    async def _body(self, request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())))

    async def _stream(self, request: Request) -> Response:
        return StreamingResponse(self._pieces())

    async def _pieces(self) -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(1 << 16)
                self.sent += 1 << 16
                await asyncio.sleep(0)
        finally:
            self.ended.set()

    async def connect(self, address: str = "127.0.0.2") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(address, 0))
        self.clients.append(writer)
        return reader, writer

    async def leave(self) -> None:
        """Close all connections of clients."""
        for writer in self.clients:
            writer.transport.abort()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@asynccontextmanager
async def server() -> AsyncIterator[Server]:
    found = Server()
    listener = listen("127.0.0.1", 0, "port")
    found.port = listener.getsockname()[1]
    async with serving(found.app(), listener):
        try:
            yield found
        finally:
            await found.leave()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """True if the connection ended; waits a moment for it."""
    try:
        async with asyncio.timeout(0.1):
            return await reader.read(1 << 16) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "begin",
    [
        b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: ", REQUEST + b"G", REQUEST + REQUEST + b"G",
        b"POST /body HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\nG",
    ],
)  # fmt: skip
@on_loop
async def test_a_request_that_never_ends_is_dropped_however_it_dribbles(
    begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.5)
    async with server() as found, asyncio.timeout(PATIENCE_SECONDS):
        reader, writer = await found.connect()
        writer.write(begin)
        while not await is_closed(reader):
            if begin:
                writer.write(b"x")


@on_loop
async def test_an_idle_connection_is_the_clients_to_end() -> None:
    """Its client may send a request at any time until then, which the server must not answer with an end."""
    client_seconds = httpx.Limits().keepalive_expiry
    assert client_seconds is not None
    async with server() as found, asyncio.timeout(PATIENCE_SECONDS):
        reader, writer = await found.connect()
        for pause in (client_seconds + 0.5, 0.0):
            writer.write(REQUEST)
            assert (await reader.readuntil(b"here")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(pause)


@on_loop
async def test_who_waits_for_nothing_but_the_server_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_SECONDS", 0.5)
    async with server() as found, asyncio.timeout(PATIENCE_SECONDS):
        streamed, stream = await found.connect()
        stream.write(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        reader, writer = await found.connect()
        began = time.monotonic()
        while time.monotonic() - began < 2.0:
            writer.write(REQUEST)
            assert (await reader.readuntil(b"here")).startswith(b"HTTP/1.1 200")
            assert await streamed.read(1 << 20)
            await asyncio.sleep(0.05)


@on_loop
async def test_who_does_not_read_is_dropped_and_little_is_kept_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "READ_SECONDS", 0.5)
    async with server() as found, asyncio.timeout(PATIENCE_SECONDS):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
            client.connect(("127.0.0.1", found.port))
            client.sendall(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await found.ended.wait()
        assert 0 < found.sent < 1 << 20


@pytest.mark.parametrize("limit", ["MAX_CONNECTIONS", "MAX_ADDRESS_CONNECTIONS"])
@on_loop
async def test_connections_are_bounded_and_come_free_again(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, limit, 3)
    async with server() as found, asyncio.timeout(PATIENCE_SECONDS):
        crowd = [await found.connect() for _ in range(5)]
        assert [await is_closed(reader) for reader, _ in crowd] == [False] * 3 + [True] * 2
        assert await is_closed((await found.connect("127.0.0.3"))[0]) is (limit == "MAX_CONNECTIONS")
        await found.leave()
        reader, writer = await found.connect()
        writer.write(REQUEST)
        assert await reader.readuntil(b"here")


@on_loop
async def test_the_end_of_the_server_ends_an_endless_stream_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "DRAIN_SECONDS", 1)
    found, listener = Server(), listen("127.0.0.1", 0, "port")
    found.port = listener.getsockname()[1]
    async with serving(found.app(), listener):
        reader, writer = await found.connect()
        writer.write(REQUEST.replace(b"/ ", b"/stream ", 1))
        await reader.readuntil(b"\r\n\r\n")
    await found.leave()
    assert found.ended.is_set()
    assert not caplog.records


def test_an_address_is_what_one_client_cannot_choose() -> None:
    assert client_network(("10.0.0.1", 1)) == "10.0.0.1" != client_network(("10.0.0.2", 1))
    assert client_network(("2001:db8::1", 1)) == client_network(("2001:db8::ffff:1", 2))
    assert client_network(("2001:db8::1", 1)) != client_network(("2001:db8:0:1::1", 1))
    assert client_network(("fe80::1%eth0", 1)) == client_network(("fe80::2", 1))
    assert client_network(None) == ""


OWN = ("localhost", "LOCALHOST:80", "localhost.", "127.0.0.1:8080", "[::1]:8080", "203.0.113.9", "Page.Example.org:443")
FOREIGN = (
    "evil.example",
    "evil.example:8080",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "1.2.3",
    "[",
    "",
    "a@b c",
)


@on_loop
async def test_names_that_others_can_lead_here_are_refused_and_told_the_option() -> None:
    app = Guard(Server().app(), ["page.example.org"])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        for host in OWN:
            assert (await client.get("/", headers={"host": host})).status_code == 200, host
        for host in FOREIGN:
            response = await client.get("/", headers={"host": host})
            assert response.status_code == 421, host
            assert f"--host-name {host_name(host)!r}\n" in response.text
            assert response.text.count("\n") == 1
            assert {name: response.headers.get(name) for name in HEADERS} == HEADERS


@on_loop
async def test_a_browser_that_was_led_here_reads_nothing() -> None:
    async with server() as found, asyncio.timeout(PATIENCE_SECONDS):
        reader, writer = await found.connect()
        writer.write(b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 421 ")
        assert b"here" not in answer


@on_loop
async def test_connections_do_not_wait_for_acknowledgements_before_they_send_more() -> None:
    with listen("127.0.0.1", 0, "port") as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
