"""Peers with direct connections on loopback, whose daemons are pairs of Unix sockets within this process."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from p2ptrain.network.libp2p.control import DaemonControl, DaemonRefusal
from p2ptrain.network.libp2p.direct import DirectConnections
from p2ptrain.network.libp2p.direct_listener import DirectListener
from p2ptrain.network.libp2p.direct_records import Kind, SealedSocket, agree
from p2ptrain.network.libp2p.socket_stream import SocketStream
from tests.support.processes.daemons import eventually

BULK = "/test/bulk"
HERE = "/ip4/127.0.0.1/tcp/1"


class FakeControl:
    """Daemons that know each other by name, and say that they are connected at ``ways``."""

    def __init__(self, name: str, network: dict[str, "FakeControl"]) -> None:
        self.name = name
        self.ways: list[tuple[str, str]] = []
        self.num_asked = self.num_listed = 0
        self._network = network
        self._handlers: dict[str, Callable[[str, SocketStream], Awaitable[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        network[name] = self

    async def connections(self) -> list[tuple[str, str]]:
        self.num_listed += 1
        return self.ways

    async def serve_stream(self, protocol: str, callback: Callable[[str, SocketStream], Awaitable[None]]) -> None:
        self._handlers[protocol] = callback

    async def close(self) -> None:
        """Wait until nobody answers any more, and the sockets are closed."""
        await asyncio.gather(*self._tasks)
        await asyncio.sleep(0)

    async def open_stream(self, peer: str, protocol: str) -> SocketStream:
        self.num_asked += 1
        callback = self._network[peer]._handlers.get(protocol)
        if callback is None:
            raise DaemonRefusal("protocols not supported")
        loop = asyncio.get_running_loop()
        near, far = SocketStream(), SocketStream()
        ends = zip((near, far), socket.socketpair(socket.AF_UNIX), strict=True)

        async def connect() -> None:
            for stream, one in ends:
                await loop.create_unix_connection(lambda stream=stream: stream, sock=one)  # type: ignore[misc]

        connecting = asyncio.create_task(connect())
        try:
            await asyncio.shield(connecting)
        except asyncio.CancelledError:
            await connecting
            near.abort()
            far.abort()
            raise

        async def serve() -> None:
            try:
                await callback(self.name, far)
            finally:
                far.abort()

        self._tasks.add(task := asyncio.create_task(serve()))
        task.add_done_callback(self._tasks.discard)
        return near


class DirectPeer:
    """One end: what came in is in ``streams``."""

    def __init__(self, name: str, network: dict[str, FakeControl]) -> None:
        self.name = name
        self.control = FakeControl(name, network)
        self.streams: asyncio.Queue[tuple[str, str, SealedSocket]] = asyncio.Queue()
        self.direct = DirectConnections(
            name, cast(DaemonControl, self.control), lambda *found: self.streams.put_nowait(found), (BULK,)
        )

    @property
    def listener(self) -> DirectListener:
        assert self.direct.listener is not None
        return self.direct.listener


@asynccontextmanager
async def direct_peers(names: str = "ab", host: str = "127.0.0.1") -> AsyncIterator[list[DirectPeer]]:
    """Peers that listen and whose daemons are all connected over loopback."""
    network: dict[str, FakeControl] = {}
    peers = [DirectPeer(name, network) for name in names]
    way = f"/ip6/{host}/tcp/1" if ":" in host else f"/ip4/{host}/tcp/1"
    for peer in peers:
        peer.control.ways = [(other.name, way) for other in peers if other is not peer]
        await peer.direct.start((host,), 0)
    try:
        yield peers
    finally:
        for peer in peers:
            await peer.direct.close()
        for peer in peers:
            await peer.control.close()


async def until(condition: Callable[[], bool]) -> None:
    async def holds() -> bool:
        return condition()

    await eventually(holds)


async def opened(a: DirectPeer, b: DirectPeer) -> tuple[SealedSocket, SealedSocket]:
    """Both ends of a stream that ``a`` opens to ``b``."""
    near = await a.direct.open(b.name, BULK, 5, is_large=True)
    assert near is not None
    peer, protocol, far = await b.streams.get()
    assert (peer, protocol) == (a.name, BULK)
    return near, far


class Dialler:
    """A peer that was made an offer, for tests that misuse it."""

    def __init__(self, listener: DirectPeer, name: str) -> None:
        private = X25519PrivateKey.generate()
        key = private.public_key().public_bytes_raw()
        terms = (name, listener.name, BULK, key, listener.listener.offer(name, BULK, key))
        self.name, self.sealing, self.opening = agree(private, terms[-1], *terms)
        self.hello = self.name + self.sealing.mark(Kind.READY)
        self._port = listener.listener.port

    async def connect(self, hello: bytes | None = None) -> SealedSocket:
        stream = SealedSocket(self.sealing, self.opening, lambda _: False)
        await asyncio.get_running_loop().create_connection(lambda: stream, "127.0.0.1", self._port)
        await SocketStream.write(stream, self.hello if hello is None else hello)
        return stream

    async def is_let_in(self, hello: bytes | None = None) -> bool:
        stream = await self.connect(hello)
        try:
            await stream.expect(Kind.READY)
        except (OSError, EOFError):
            return False
        finally:
            stream.abort()
        return True
