"""Direct connections: encrypted TCP between two peers' processes, for streams with much data.

A direct connection saves the copies through both daemons. Peers negotiate it over a stream between their daemons, which
authenticates both. After a failed attempt `DirectConnections.open` returns None, and backs off from the peer. A
connection carries one stream at a time; after an orderly end both sides keep it as a spare.
``docs/explanation/security.md`` has the protocol and the security argument.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Annotated, TypeVar

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from msgspec import Meta

from p2ptrain.buffers import Bounded
from p2ptrain.errors import PeerError, PeerRefusedError, PeerUnreachableError, ProtocolError
from p2ptrain.network.libp2p import direct_listener
from p2ptrain.network.libp2p.control import DaemonControl, DaemonGone, DaemonRefusal
from p2ptrain.network.libp2p.direct_listener import DirectListener
from p2ptrain.network.libp2p.direct_records import Kind, SealedSocket, agree
from p2ptrain.network.libp2p.socket_stream import SocketStream
from p2ptrain.network.reachability import Port, host_of, scope
from p2ptrain.network.rpc import frames
from p2ptrain.network.schema import Message
from p2ptrain.network.transport import PeerId
from p2ptrain.tasks import Backoff

T = TypeVar("T")

logger = logging.getLogger(__name__)

OFFERS = "/p2ptrain/direct/2"
"""Protocol name of the streams for offers."""
ASKING_SECONDS = 5.0
"""Timeout for serving one request for an offer."""
MAX_ASKING = 64
MAX_ASKING_PER_PEER = 4
DIAL_SECONDS = 3.0
"""Timeout for a whole attempt; the daemons carry the stream after it."""
TCP_SECONDS = 1.0
"""Timeout of a TCP connection, for filtered ports; < `DIAL_SECONDS`."""
READY_SECONDS = 1.0
"""Timeout for READY on a spare connection; the peer dials a new one after it."""
MAX_HOSTS = 2
MAX_SPARES = 32
FIRST_REST_SECONDS = 30.0
LONGEST_REST_SECONDS = 900.0
MAX_RESTS = 1024

PublicKey = Annotated[bytes, Meta(min_length=32, max_length=32)]
"""An ephemeral X25519 key, for one connection."""


class Ask(Message, frozen=True):
    """Request for an `Offer`."""

    protocol: Annotated[str, Meta(max_length=128)]
    key: PublicKey


class Offer(Message, frozen=True):
    """Permission for one connection to a port, within `OFFER_SECONDS` of its listener."""

    port: Port
    key: PublicKey


class DirectConnections:
    """Dials peers directly, and accepts direct connections.

    Args:
        on_stream: Called with peer, protocol and connection when a peer begins a stream.
        served: The protocols for which peers may open streams.

    Attributes:
        listener: None if this peer does not listen.
        refusals: Refused direct connections, by cause.
    """

    def __init__(
        self,
        own_id: PeerId,
        control: DaemonControl,
        on_stream: Callable[[PeerId, str, SealedSocket], None],
        served: Collection[str],
    ) -> None:
        self.num_dialled = 0
        self.refusals: Counter[str] = Counter()
        self._own_id = own_id
        self._control = control
        self._on_stream = on_stream
        self._served = served
        self.listener: DirectListener | None = None
        self._asking: Counter[PeerId] = Counter()
        self._spares: dict[tuple[PeerId, str], tuple[SealedSocket, asyncio.TimerHandle]] = {}
        self._rests = Bounded[PeerId, tuple[Backoff, float]](MAX_RESTS)
        self._closed = False

    async def start(self, hosts: Sequence[str], port: int) -> None:
        """Listen at a port of ``hosts`` (IP addresses; empty for no listener), and serve requests for offers.

        Raises `ResourceError` if the port is taken or an address is not this machine's, and the daemon's errors.
        """
        if hosts:
            self.listener = DirectListener(self._own_id, hosts, port, self._on_stream, self.refusals)
        await self._control.serve_stream(OFFERS, self._answer)

    async def close(self) -> None:
        """End all connections; idempotent."""
        self._closed = True
        for key in list(self._spares):
            self._drop(key)
        if self.listener is not None:
            await self.listener.close()

    # Dialling

    async def open(self, peer: PeerId, protocol: str, timeout_seconds: float) -> SealedSocket | None:
        """Return a connection to the peer's handler of ``protocol``; None if no direct one is possible in time."""
        loop, key = asyncio.get_running_loop(), (peer, protocol)
        deadline = loop.time() + min(DIAL_SECONDS, timeout_seconds)
        spare, timer = self._spares.pop(key, (None, None))
        if timer is not None:
            timer.cancel()
        if spare is not None and not spare.is_closing:
            try:
                async with asyncio.timeout(min(READY_SECONDS, timeout_seconds)):
                    return await _begin(spare)
            except (OSError, EOFError, TimeoutError) as error:
                logger.debug("a direct connection to peer %s is not used again: %r", peer[-8:], error)
        if peer in self._rests and loop.time() < self._rests[peer][1]:
            return None
        return await self._dial(peer, protocol, deadline - loop.time())

    def _take_back(self, key: tuple[PeerId, str], connection: SealedSocket) -> bool:
        """Keep a connection as a spare for the next stream; False if it is not needed."""
        if self._closed or key in self._spares or len(self._spares) >= MAX_SPARES:
            return False
        timer = asyncio.get_running_loop().call_later(direct_listener.SPARE_SECONDS, self._drop, key)
        self._spares[key] = (connection, timer)
        return True

    def _drop(self, key: tuple[PeerId, str]) -> None:
        connection, timer = self._spares.pop(key)
        timer.cancel()
        connection.abort()

    async def _dial(self, peer: PeerId, protocol: str, timeout_seconds: float) -> SealedSocket | None:
        """Return a stream on a new connection; None on failure, which starts a backoff."""
        try:
            async with asyncio.timeout(timeout_seconds):
                hosts = await self.hosts_of(peer)
                if not hosts:
                    return None  # connected only over a relay, or not yet
                connection = await self._connect(hosts, peer, protocol)
        except (PeerError, OSError, EOFError, TimeoutError, DaemonGone, DaemonRefusal) as error:
            self._rest(peer, error.reason if isinstance(error, PeerError) else str(error) or "no answer in time")
            return None
        self._rests.pop(peer, None)
        self.num_dialled += 1
        return connection

    async def hosts_of(self, peer: PeerId) -> list[str]:
        """Return the IP addresses of the daemon's connections with ``peer``, at most `MAX_HOSTS`, nearest first.

        Other addresses are untrusted: with them a peer could make this one dial third parties.
        """
        ways = [address for remote, address in await self._control.connections() if remote == peer]
        near = sorted((address for address in ways if host_of(address)), key=scope, reverse=True)
        return list(dict.fromkeys(map(host_of, near)))[:MAX_HOSTS]

    async def _connect(self, hosts: Sequence[str], peer: PeerId, protocol: str) -> SealedSocket:
        private = X25519PrivateKey.generate()
        own_key = private.public_key().public_bytes_raw()
        offer = await self._ask(peer, Ask(protocol, own_key))
        try:
            name, sealing, opening = agree(private, offer.key, self._own_id, peer, protocol, own_key, offer.key)
        except ValueError as error:
            raise ProtocolError(peer, "sent a key that is none") from error
        # All hosts get the same first record, and only one gets later ones. So no nonce encrypts two records.
        hello, refusal = name + sealing.mark(Kind.READY), ""
        for host in hosts:
            connection = SealedSocket(sealing, opening, partial(self._take_back, (peer, protocol)))
            try:
                await _tcp(connection, host, offer.port)
                return await _begin(connection, hello)
            except (OSError, EOFError, TimeoutError) as error:
                refusal = f"{host} port {offer.port}: {error or 'no answer in time'}"
        raise PeerUnreachableError(peer, refusal)

    async def _ask(self, peer: PeerId, ask: Ask) -> Offer:
        stream = await self._control.open_stream(peer, OFFERS)
        try:
            await stream.write(_message(ask))
            return await _receive(stream, peer, Offer)
        finally:
            stream.abort()

    def _rest(self, peer: PeerId, reason: str) -> None:
        """Start or double the backoff of direct dials to a peer."""
        backoff, _ = self._rests.get(peer, (Backoff(FIRST_REST_SECONDS, LONGEST_REST_SECONDS), 0.0))
        self._rests[peer] = backoff, asyncio.get_running_loop().time() + backoff.next()
        logger.info("peer %s is not reached directly, but through the daemon: %s", peer[-8:], reason)

    # Answering

    async def _answer(self, peer: PeerId, stream: SocketStream) -> None:
        if self._closed or self._asking[peer] >= MAX_ASKING_PER_PEER or self._asking.total() >= MAX_ASKING:
            stream.abort()
            return
        self._asking[peer] += 1
        try:
            async with asyncio.timeout(ASKING_SECONDS):
                await stream.write(self._answer_to(peer, await _receive(stream, peer, Ask)))
                await stream.read(1)  # wait until the asker closes: closing first could lose the answer
        except (OSError, EOFError, TimeoutError, PeerError) as error:
            logger.debug("peer %s asked for no offer: %r", peer[-8:], error)
        finally:
            stream.abort()
            self._asking -= Counter([peer])

    def _answer_to(self, peer: PeerId, ask: Ask) -> bytes:
        if self.listener is None:
            return frames.error_frame("this peer does not listen for direct connections")
        if ask.protocol not in self._served:
            return frames.error_frame("this peer does not serve that")
        try:
            return _message(Offer(self.listener.port, self.listener.offer(peer, ask.protocol, ask.key)))
        except ValueError as error:
            return frames.error_frame(str(error))


async def _tcp(connection: SealedSocket, host: str, port: int) -> None:
    async with asyncio.timeout(TCP_SECONDS):
        await asyncio.get_running_loop().create_connection(lambda: connection, host, port)


async def _begin(connection: SealedSocket, hello: bytes = b"") -> SealedSocket:
    """Begin a stream once the listener is READY; abort the connection on failure."""
    try:
        if hello:
            await SocketStream.write(connection, hello)
        await connection.expect(Kind.READY)
        await connection.mark(Kind.START)
    except BaseException:
        connection.abort()
        raise
    return connection


def _message(message: Message) -> bytes:
    return frames.frame(frames.Kind.MESSAGE, frames.pack(message))


async def _receive(stream: SocketStream, peer: PeerId, schema: type[T]) -> T:
    """Return one message; raise `PeerRefusedError` for an ERROR, and `ProtocolError` for anything else."""
    length, kind = frames.FRAME.unpack(await stream.read(frames.FRAME.size))
    if kind not in (frames.Kind.MESSAGE, frames.Kind.ERROR) or length > frames.MAX_REASON_BYTES:
        raise ProtocolError(peer, f"sent a frame of kind {kind} and {length} bytes where an offer was due")
    data = await stream.read(length)
    if kind == frames.Kind.ERROR:
        raise PeerRefusedError(peer, frames.unpack(data, peer, frames.Refusal).reason)
    return frames.unpack(data, peer, schema)
