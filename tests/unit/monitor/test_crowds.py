"""A thousand connections or streams of one address leave the page to another; names that lead here read nothing."""

import asyncio
import contextlib
import resource

import pytest

from p2ptrain.monitor.web import MAX_ADDRESS_STREAMS
from p2ptrain.network.http_server import MAX_ADDRESS_CONNECTIONS, listen, serving
from tests.support.coroutines import on_loop
from tests.support.web.site import served
from tests.support.web.watched import trainer

CROWD = 1000
MAX_FILES = 4 * CROWD
"""Both ends of each connection are in this process."""
PATIENCE_SECONDS = 60.0
SILENT_SECONDS = 2.0
"""Time for an answer that must not come."""


def asking(path: str, host: str = "localhost") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


async def connect(port: int, address: str, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    writer.write(request)
    return reader, writer


async def status_of(reader: asyncio.StreamReader, timeout_seconds: float = PATIENCE_SECONDS) -> bytes:
    """Return the status of the answer; empty if the connection is dropped, or if nothing comes."""
    try:
        async with asyncio.timeout(timeout_seconds):
            return (await reader.readline())[9:12]
    except (ConnectionError, TimeoutError):
        return b""


async def abort(clients: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    for _, writer in clients:
        writer.transport.abort()
    await asyncio.gather(*(writer.wait_closed() for _, writer in clients), return_exceptions=True)


@pytest.mark.fault(55)
@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: loc", asking("/api/v1/stream")])
@on_loop
async def test_a_thousand_connections_of_one_address_leave_the_page_to_another(sent: bytes) -> None:
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < MAX_FILES:
        pytest.skip("the limit of open files is too low")
    listener, clients = listen("127.0.0.1", 0, "port"), list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]()
    port = listener.getsockname()[1]
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (before, most))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(before, MAX_FILES), most))
        site = await stack.enter_async_context(served(trainer("a", name="Ada")))
        await stack.enter_async_context(serving(site.app, listener))
        stack.push_async_callback(abort, clients)
        for _ in range(CROWD):
            clients.append(await connect(port, "127.0.0.2", sent))
        patience = PATIENCE_SECONDS if b"stream" in sent else SILENT_SECONDS
        statuses = await asyncio.gather(*(status_of(reader, patience) for reader, _ in clients))
        held = [reader for reader, _ in clients if not reader.at_eof() and reader.exception() is None]
        assert 0 < len(held) <= MAX_ADDRESS_CONNECTIONS
        assert statuses.count(b"200") == (MAX_ADDRESS_STREAMS if b"stream" in sent else 0)
        for path in ("/", "/api/v1/stream"):
            clients.append(await connect(port, "127.0.0.3", asking(path)))
            assert await status_of(clients[-1][0]) == b"200", path
        clients.append(await connect(port, "127.0.0.3", asking("/", "evil.example")))
        assert await status_of(clients[-1][0]) == b"421"
