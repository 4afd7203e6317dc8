"""The answering half of direct connections: a TCP port that takes only those that were offered before.

::

    connected ──▶ TLS handshake ──▶ token ──▶ ACCEPTED ──▶ spare ──▶ START ──▶ the stream
                  the server name    whose and   ▲        for a while              │
                  must be an offer's what for    └────── if it ended in order ─────┘

An `Offer` is made over a stream whose peer is authenticated already (see `p2ptrain.network.libp2p.direct`). It is good
for one connection, a few seconds long, by whoever holds the key of the certificate that this peer named and knows the
token. Everything else is closed and counted. What strangers can cost is bounded: handshakes at a time, in all and from
one host, their time, and the connections of each peer and of all.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from p2ptrain.errors import ResourceError
from p2ptrain.network.libp2p.direct_tls import Certificate, TlsSocket
from p2ptrain.network.transport import PeerId
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)

TOKEN_BYTES = 32
ACCEPTED = b"\x01"
START = b"\x02"


@dataclass(frozen=True)
class DirectLimits:
    """What other peers, and strangers, may use of the port for direct connections."""

    offer_seconds: float = 10.0
    """How long a token is good for."""
    handshake_seconds: float = 5.0
    """From the TCP connection to the token."""
    spare_seconds: float = 60.0
    """How long a connection without a stream is kept by whoever dialled it; half as long again by the listener."""
    handshakes: int = 32
    """Handshakes at a time."""
    handshakes_per_host: int = 8
    """Handshakes at a time from one IP address."""
    connections: int = 128
    """Accepted connections at a time, and offers that are good."""
    connections_per_peer: int = 8
    """The same for one peer."""


class OfferRefusedError(Exception):
    """No offer is made to a peer; the message says why."""


@dataclass(frozen=True)
class _Offer:
    peer: PeerId
    protocol: str
    certificate: bytes
    expires_at: float


def server_name(token: bytes) -> str:
    """What a dialler calls the server in its first message, which is not encrypted: it must not tell the token."""
    return "p" + hashlib.sha256(token).hexdigest()[:32]


class DirectListener:
    """Listens, and hands over what was offered.

    Args:
        certificate: What this peer presents.
        hosts: IP addresses to listen at.
        port: The same for all of them; 0 takes any free one.
        on_stream: Called with peer, protocol and connection when a dialler begins a stream.
        limits: Bounds.

    Attributes:
        port: Where it listens.
        refusals: How often something was refused, by cause.
    """

    def __init__(
        self,
        certificate: Certificate,
        hosts: Sequence[str],
        port: int,
        on_stream: Callable[[PeerId, str, TlsSocket], None],
        limits: DirectLimits,
    ) -> None:
        self.refusals: Counter[str] = Counter()
        self._certificate = certificate
        self._on_stream = on_stream
        self._limits = limits
        self._offers: dict[str, _Offer] = {}
        self._handshakes: Counter[str] = Counter()
        self._connections: Counter[PeerId] = Counter()
        self._context = certificate.choosing_context(self._choose)
        self._sockets = _listen(hosts, port)
        self.port: int = self._sockets[0].getsockname()[1]
        self._tasks = Tasks()
        for one in self._sockets:
            self._tasks.keep(partial(self._accept, one), "direct-accept")

    @property
    def num_connections(self) -> int:
        """Accepted connections now, with and without streams."""
        return self._connections.total()

    def offer(self, peer: PeerId, protocol: str, certificate: bytes) -> bytes:
        """A token with which ``peer``, which presents ``certificate``, may open one stream of ``protocol``.

        Raises:
            OfferRefusedError: There are too many connections, or the certificate is none.
        """
        now = asyncio.get_running_loop().time()
        for name in [name for name, offer in self._offers.items() if offer.expires_at <= now]:
            del self._offers[name]
        good = Counter(offer.peer for offer in self._offers.values()) + self._connections
        if good[peer] >= self._limits.connections_per_peer or good.total() >= self._limits.connections:
            self.refusals["too many connections"] += 1
            raise OfferRefusedError("too many connections")
        try:
            self._certificate.context(certificate, is_server=True)  # made now, for the first message of the handshake
        except ssl.SSLError as error:
            raise OfferRefusedError("a malformed certificate") from error
        token = secrets.token_bytes(TOKEN_BYTES)
        self._offers[server_name(token)] = _Offer(peer, protocol, certificate, now + self._limits.offer_seconds)
        return token

    async def close(self) -> None:
        """Stop listening and end all connections; idempotent."""
        await self._tasks.close()
        for one in self._sockets:
            one.close()

    def _choose(self, name: str) -> ssl.SSLContext | None:
        offer = self._offers.get(name)
        if offer is None or offer.expires_at <= asyncio.get_running_loop().time():
            return None
        return self._certificate.context(offer.certificate, is_server=True)

    async def _accept(self, listening: socket.socket) -> None:
        loop, limits = asyncio.get_running_loop(), self._limits
        while True:
            try:
                connection, address = await loop.sock_accept(listening)
            except OSError as error:  # no file descriptors left, or the dialler gave up
                self._refuse("not accepted", error)
                await asyncio.sleep(0.1)
                continue
            host = address[0]
            is_full = self._handshakes.total() >= limits.handshakes
            if is_full or self._handshakes[host] >= limits.handshakes_per_host:
                connection.close()
                self._refuse("too many handshakes", host)
                continue
            self._handshakes[host] += 1
            self._tasks.start(self._serve(connection, host), "direct-connection")

    async def _serve(self, connection: socket.socket, host: str) -> None:
        """One connection, from its beginning to its end."""
        try:
            found = await self._admit(connection)
        finally:
            self._handshakes[host] -= 1
            if not self._handshakes[host]:
                del self._handshakes[host]
        if found is None:
            return
        stream, offer = found
        self._connections[offer.peer] += 1
        try:
            while await self._carry(stream, offer):
                pass
        except (OSError, EOFError, TimeoutError) as error:
            logger.debug("a direct connection of peer %s was not used: %s", offer.peer[-8:], error)
        finally:
            stream.abort()
            self._connections[offer.peer] -= 1
            if not self._connections[offer.peer]:
                del self._connections[offer.peer]

    async def _carry(self, stream: TlsSocket, offer: _Offer) -> bool:
        """One stream of a connection; whether there may be another.

        Raises:
            OSError, EOFError, TimeoutError: None was begun.
        """
        await stream.write(ACCEPTED)
        async with asyncio.timeout(1.5 * self._limits.spare_seconds):
            if await stream.read(len(START)) != START:
                raise EOFError("something else than a start")
        is_over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take_back() -> bool:
            is_over.set_result(None)
            return True

        stream.on_rest = take_back
        try:
            async with Tasks() as tasks:
                gone = tasks.call(stream.wait_gone(), "gone")
                self._on_stream(offer.peer, offer.protocol, stream)
                await asyncio.wait({is_over, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stream.on_rest = None
        return is_over.done()

    async def _admit(self, connection: socket.socket) -> tuple[TlsSocket, _Offer] | None:
        """The handshake and the token; None, and counted, if anything is wrong with them."""
        loop, seconds = asyncio.get_running_loop(), self._limits.handshake_seconds
        stream, offer = TlsSocket(), None
        try:
            async with asyncio.timeout(seconds):
                # What this returns is another object on uvloop, which names its own protocol.
                await loop.connect_accepted_socket(
                    lambda: stream, connection, ssl=self._context, ssl_handshake_timeout=2 * seconds
                )
                offer = self._claim(await stream.read(TOKEN_BYTES), stream)
        except TimeoutError:
            self._refuse("too slow", "")
        except (OSError, EOFError) as error:
            self._refuse("no handshake" if stream.is_closing else "no token", error)
        finally:
            if offer is None:
                stream.abort()
        return (stream, offer) if offer is not None else None

    def _claim(self, token: bytes, stream: TlsSocket) -> _Offer | None:
        """The offer that a token is for, which is good no more; None if it is not this dialler's."""
        offer = self._offers.pop(server_name(token), None)
        if offer is None:
            self._refuse("unknown token", "")
        elif stream.remote_certificate != offer.certificate:
            self._refuse("wrong certificate", offer.peer)
        elif offer.expires_at <= asyncio.get_running_loop().time():
            self._refuse("expired token", offer.peer)
        else:
            return offer
        return None

    def _refuse(self, cause: str, detail: object) -> None:
        self.refusals[cause] += 1
        logger.debug("refused a direct connection: %s (%s)", cause, detail)


def _listen(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Sockets at one port of all ``hosts``.

    Raises:
        ResourceError: The port is taken, or an address is not this machine's.
    """
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
