"""The listener for direct connections: a TCP port for peers that hold an offer (`p2ptrain.network.libp2p.direct`).

An offer is valid for one connection within `OFFER_SECONDS`. The listener closes and counts all other connections.
Connections are bounded before and after their first record is verified.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from p2ptrain.errors import ResourceError
from p2ptrain.network.libp2p.direct_records import HELLO_BYTES, NAME_BYTES, Cipher, Kind, SealedSocket, agree
from p2ptrain.network.transport import PeerId
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)


OFFER_SECONDS = 10.0
HANDSHAKE_SECONDS = 5.0
"""Timeout from the TCP connection to the first record."""
SPARE_SECONDS = 60.0
"""Time that the dialler keeps an idle connection; the listener keeps it 1.5 times as long."""
PAUSE_SECONDS = 0.1
"""Time without accepting after the operating system refused to."""
MAX_HANDSHAKES = 128
"""Most parallel connections without a verified first record."""
MAX_HANDSHAKES_PER_HOST = 8
MAX_CONNECTIONS = 128
"""Most accepted connections and valid offers together; a spare is offered up to half of it."""
MAX_CONNECTIONS_PER_PEER = 8


@dataclass(frozen=True)
class _Offer:
    peer: PeerId
    protocol: str
    sealing: Cipher
    opening: Cipher
    expires_at: float


class DirectListener:
    """Accepts connections of peers with an offer, and hands over their streams.

    Args:
        hosts: IP addresses to listen at.
        port: Common to all hosts; 0 takes any free one.
        on_stream: Called with peer, protocol and connection when a dialler begins a stream.
        refusals: Counts refused connections, by cause.
    """

    def __init__(
        self,
        own_id: PeerId,
        hosts: Sequence[str],
        port: int,
        on_stream: Callable[[PeerId, str, SealedSocket], None],
        refusals: Counter[str],
    ) -> None:
        self._refusals = refusals
        self._own_id = own_id
        self._on_stream = on_stream
        self._offers: dict[bytes, _Offer] = {}
        self._handshakes: dict[socket.socket, str] = {}
        self._connections: Counter[PeerId] = Counter()
        self._sockets = _listen(hosts, port)
        self.port: int = self._sockets[0].getsockname()[1]
        self._tasks = Tasks()
        self._loop = asyncio.get_running_loop()
        for one in self._sockets:
            self._loop.add_reader(one, self._accept, one)

    def offer(self, peer: PeerId, protocol: str, key: bytes, *, is_spare: bool = False) -> bytes:
        """Allow ``peer`` one connection for streams of ``protocol``, which for now is a spare, or carries one.

        ``key`` is the peer's ephemeral public key. The result is this peer's ephemeral public key. Raises `ValueError`
        if there are too many connections, or the key is invalid.
        """
        now = self._loop.time()
        for name in [name for name, offer in self._offers.items() if offer.expires_at <= now]:
            del self._offers[name]
        good = Counter(offer.peer for offer in self._offers.values()) + self._connections
        limit = MAX_CONNECTIONS // 2 if is_spare else MAX_CONNECTIONS
        if good[peer] >= MAX_CONNECTIONS_PER_PEER or good.total() >= limit:
            self._refusals["too many connections"] += 1
            raise ValueError("too many connections")
        private = X25519PrivateKey.generate()
        own_key = private.public_key().public_bytes_raw()
        name, opening, sealing = agree(private, key, peer, self._own_id, protocol, key, own_key)
        self._offers[name] = _Offer(peer, protocol, sealing, opening, now + OFFER_SECONDS)
        return own_key

    async def close(self) -> None:
        """Stop listening and close all connections; idempotent."""
        while self._sockets:
            self._loop.remove_reader(self._sockets[-1])
            self._sockets.pop().close()
        await self._tasks.close()
        for connection in self._handshakes:  # Of tasks that were cancelled before they began.
            connection.close()
        self._handshakes.clear()

    def _accept(self, listening: socket.socket) -> None:
        """Accept one connection. A callback, since a cancelled task could lose one that it had accepted."""
        try:
            connection, address = listening.accept()
        except BlockingIOError:  # The dialler gave up.
            return
        except OSError as error:
            self._refuse("not accepted", error)
            if not isinstance(error, ConnectionAbortedError):  # No free file descriptor.
                self._loop.remove_reader(listening)
                self._loop.call_later(PAUSE_SECONDS, self._accept_again, listening)
            return
        host = address[0]
        num_of_host = sum(host == other for other in self._handshakes.values())
        if len(self._handshakes) >= MAX_HANDSHAKES or num_of_host >= MAX_HANDSHAKES_PER_HOST:
            connection.close()
            self._refuse("too many handshakes", host)
            return
        connection.setblocking(False)
        self._handshakes[connection] = host
        self._tasks.start(self._serve(connection), "direct-connection")

    def _accept_again(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:  # It is not closed.
            self._loop.add_reader(listening, self._accept, listening)

    async def _serve(self, connection: socket.socket) -> None:
        offer = None
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                offer = self._claim(await self._hello(connection))
        except TimeoutError:
            self._refuse("too slow", "")
        except (OSError, EOFError) as error:
            self._refuse("no hello", error)
        finally:
            del self._handshakes[connection]
            if offer is None:
                connection.close()
        if offer is not None:
            self._connections[offer.peer] += 1
            try:
                await self._carry_all(connection, offer)
            finally:
                self._connections -= Counter([offer.peer])

    async def _hello(self, connection: socket.socket) -> bytes:
        """Read a dialler's first `HELLO_BYTES`; only the first bytes if they hold no known name."""
        hello = b""
        while len(hello) < NAME_BYTES or (hello[:NAME_BYTES] in self._offers and len(hello) < HELLO_BYTES):
            more = await self._loop.sock_recv(connection, HELLO_BYTES - len(hello))
            if not more:
                raise EOFError("it ended")
            hello += more
        return hello

    def _claim(self, hello: bytes) -> _Offer | None:
        """Remove and return the offer whose key the dialler has proved to hold; None, and a refusal, without one."""
        name, record = hello[:NAME_BYTES], hello[NAME_BYTES:]
        offer = self._offers.get(name)
        if offer is None:
            self._refuse("unknown name", "")
        elif offer.expires_at <= self._loop.time():
            self._refuse("expired offer", offer.peer)
        elif not offer.opening.opens(Kind.READY, record):
            self._refuse("wrong key", offer.peer)
        else:
            return self._offers.pop(name)
        return None

    async def _carry_all(self, connection: socket.socket, offer: _Offer) -> None:
        """Serve streams one after the other, until the connection ends or stays idle for too long."""
        rested = asyncio.Event()

        def take_back(_: SealedSocket) -> bool:
            rested.set()
            return True

        stream = SealedSocket(offer.sealing, offer.opening, take_back)
        try:
            # Ignore the result: uvloop returns another protocol object.
            await self._loop.connect_accepted_socket(lambda: stream, connection)
            while not stream.is_closing:
                await stream.mark(Kind.READY)
                async with asyncio.timeout(1.5 * SPARE_SECONDS):
                    await stream.expect(Kind.START)
                async with Tasks() as tasks:
                    ends = {tasks.call(stream.wait_gone(), "gone"), tasks.call(rested.wait(), "rested")}
                    self._on_stream(offer.peer, offer.protocol, stream)
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                rested.clear()
        except (OSError, EOFError, TimeoutError) as error:
            logger.debug("a direct connection of peer %s was not used: %s", offer.peer[-8:], error)
        finally:
            stream.abort()

    def _refuse(self, cause: str, detail: object) -> None:
        self._refusals[cause] += 1
        logger.debug("refused a direct connection: %s (%s)", cause, detail)


def _listen(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Return listening sockets at one port of all ``hosts``; raise `ResourceError` on failure."""
    sockets: list[socket.socket] = []
    try:
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            sockets.append(socket.create_server((host, port), family=family, backlog=64))
            sockets[-1].setblocking(False)
            port = sockets[0].getsockname()[1]
    except OSError as error:
        for one in sockets:
            one.close()
        raise ResourceError(
            f"cannot listen at {host} port {port} for direct connections: {error.strerror}; choose another port with "
            "network.direct_port (0 takes any free one), or switch them off with network.direct = 'off'"
        ) from error
    return sockets
