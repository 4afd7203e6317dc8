"""Direct connections: encrypted TCP between two peers' processes, which save the way through both daemons.

Peers negotiate a connection over a stream between their daemons, which authenticates both. After a failed attempt
`DirectConnections.open` returns None, and backs off from the peer. A connection carries one stream at a time; after an
orderly end both sides keep it as a spare. A stream with much data waits for a new connection if there is no spare. One
with little takes the daemon then, and from the second such stream to a peer on, a spare is dialled for the next.
``docs/explanation/security.md`` has the protocol and the security argument.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
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
from p2ptrain.network.libp2p.direct_records import OVERHEAD_BYTES, Kind, SealedSocket, agree
from p2ptrain.network.libp2p.socket_stream import SocketStream
from p2ptrain.network.reachability import Port, host_of, scope
from p2ptrain.network.rpc import frames
from p2ptrain.network.schema import Message
from p2ptrain.network.transport import PeerId
from p2ptrain.tasks import Backoff, Tasks

T = TypeVar("T")
_Way = tuple[PeerId, str]
"""A peer and the protocol of streams to it."""

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
MAX_SPARES_PER_PEER = 4
"""For streams at the same time; < the listener's `MAX_CONNECTIONS_PER_PEER`."""
FIRST_REST_SECONDS = 30.0
LONGEST_REST_SECONDS = 900.0
MAX_REMEMBERED = 1024
"""Bound on the peers with a backoff, and on those whose last stream went through the daemon."""

PublicKey = Annotated[bytes, Meta(min_length=32, max_length=32)]
"""An ephemeral X25519 key, for one connection."""


class Ask(Message, frozen=True):
    """Request for an `Offer`."""

    protocol: Annotated[str, Meta(max_length=128)]
    key: PublicKey
    is_spare: bool = False


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
        self._loop = asyncio.get_running_loop()
        self.num_dialled = 0
        self.refusals: Counter[str] = Counter()
        self._own_id = own_id
        self._control = control
        self._on_stream = on_stream
        self._served = served
        self.listener: DirectListener | None = None
        self._asking: Counter[PeerId] = Counter()
        self._spares: dict[SealedSocket, tuple[_Way, asyncio.TimerHandle]] = {}
        self._rests = Bounded[PeerId, tuple[Backoff, float]](MAX_REMEMBERED)
        self._spare_from = Bounded[_Way, float](MAX_REMEMBERED)
        self._dials = Tasks()
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
        await self._dials.close()
        for spare in list(self._spares):
            self._take(spare).abort()
        if self.listener is not None:
            await self.listener.close()

    # Dialling

    async def open(self, peer: PeerId, protocol: str, timeout_seconds: float, *, is_large: bool) -> SealedSocket | None:
        """Return a connection to the peer's handler of ``protocol``; None if the daemon is to carry the stream."""
        way, deadline = (peer, protocol), self._loop.time() + min(DIAL_SECONDS, timeout_seconds)
        must_be_ready = not is_large
        while (spare := self._take_spare(way, must_be_ready=must_be_ready)) is not None:
            must_be_ready |= not spare.has_record  # One wait, so that time is left to dial.
            if await _has_begun(spare, min(READY_SECONDS, deadline - self._loop.time())):
                return spare
        if not is_large:
            self._dial_spare(way)
            return None
        connection = await self._dial(way, deadline - self._loop.time(), is_spare=False)
        is_begun = connection is not None and await _has_begun(connection, READY_SECONDS)
        return connection if is_begun else None

    def _dial_spare(self, way: _Way) -> None:
        """Dial a spare in the background, unless this is the first stream to the peer or another such dial goes on."""
        now = self._loop.time()
        if way not in self._spare_from:
            self._spare_from[way] = now
        elif self._spare_from[way] <= now and not self._closed:
            self._spare_from[way] = math.inf
            self._dials.start(self._add_spare(way), f"direct-dial-{way[0][-8:]}")

    async def _add_spare(self, way: _Way) -> None:
        is_kept = False
        try:
            connection = await self._dial(way, DIAL_SECONDS, is_spare=True)
            is_kept = connection is not None and self._take_back(way, connection)
            if connection is not None and not is_kept:
                connection.abort()
        finally:
            self._spare_from[way] = self._loop.time() + (0.0 if is_kept else FIRST_REST_SECONDS)

    def _take_back(self, way: _Way, connection: SealedSocket) -> bool:
        """Keep a connection as a spare for the next stream; False if it is not needed."""
        if self._closed or len(self._spares) >= MAX_SPARES or len(self._spares_for(way)) >= MAX_SPARES_PER_PEER:
            return False
        timer = self._loop.call_later(direct_listener.SPARE_SECONDS, lambda: self._take(connection).abort())
        self._spares[connection] = way, timer
        return True

    def forget(self, peer: PeerId) -> None:
        """Drop the spares to a peer: a stream with it broke, and others on the same way might, too."""
        for spare in [spare for spare, ((to, _), _) in self._spares.items() if to == peer]:
            self._take(spare).abort()

    def _spares_for(self, way: _Way) -> list[SealedSocket]:
        """Return the spares of a way, the last one used first; drop those that ended."""
        for spare in [spare for spare in self._spares if spare.is_closing]:
            self._take(spare)
        return [spare for spare, (to, _) in reversed(self._spares.items()) if to == way]

    def _take_spare(self, way: _Way, *, must_be_ready: bool) -> SealedSocket | None:
        """Return a spare, one whose listener is READY if there is any; None if there is none."""
        spares = self._spares_for(way)
        ready = [spare for spare in spares if spare.has_record]
        found = ready if ready or must_be_ready else spares
        return self._take(found[0]) if found else None

    def _take(self, spare: SealedSocket) -> SealedSocket:
        _, timer = self._spares.pop(spare)
        timer.cancel()
        return spare

    async def _dial(self, way: _Way, timeout_seconds: float, *, is_spare: bool) -> SealedSocket | None:
        """Return a new connection, which is READY; None on failure, or during a backoff from the peer.

        A failure starts the backoff, except that a peer which refuses a spare may still take a large stream.
        """
        peer, protocol = way
        if peer in self._rests and self._loop.time() < self._rests[peer][1]:
            return None
        try:
            async with asyncio.timeout(timeout_seconds):
                hosts = await self.hosts_of(peer)
                if not hosts:
                    return None  # connected only over a relay, or not yet
                connection = await self._connect(hosts, peer, protocol, is_spare=is_spare)
        except (PeerError, OSError, EOFError, TimeoutError, DaemonGone, DaemonRefusal) as error:
            reason = error.reason if isinstance(error, PeerError) else str(error) or "no answer in time"
            level = logging.DEBUG if is_spare else logging.INFO
            logger.log(level, "peer %s is not reached directly, but through the daemon: %s", peer[-8:], reason)
            if not (is_spare and isinstance(error, PeerRefusedError)):
                self._rest(peer)
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

    async def _connect(self, hosts: Sequence[str], peer: PeerId, protocol: str, *, is_spare: bool) -> SealedSocket:
        private = X25519PrivateKey.generate()
        own_key = private.public_key().public_bytes_raw()
        offer = await self._ask(peer, Ask(protocol, own_key, is_spare))
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
                await SocketStream.write(connection, hello)
                await connection.peek(OVERHEAD_BYTES)
                return connection
            except BaseException as error:
                connection.abort()
                if not isinstance(error, (OSError, EOFError, TimeoutError)):
                    raise
                refusal = f"{host} port {offer.port}: {error or 'no answer in time'}"
        raise PeerUnreachableError(peer, refusal)

    async def _ask(self, peer: PeerId, ask: Ask) -> Offer:
        stream = await self._control.open_stream(peer, OFFERS)
        try:
            await stream.write(_message(ask))
            return await _receive(stream, peer, Offer)
        finally:
            stream.abort()

    def _rest(self, peer: PeerId) -> None:
        """Start or double the backoff of direct dials to a peer."""
        backoff, _ = self._rests.get(peer, (Backoff(FIRST_REST_SECONDS, LONGEST_REST_SECONDS), 0.0))
        self._rests[peer] = backoff, self._loop.time() + backoff.next()

    # Answering

    async def _answer(self, peer: PeerId, stream: SocketStream) -> None:
        if self._closed or self._asking[peer] >= MAX_ASKING_PER_PEER or self._asking.total() >= MAX_ASKING:
            stream.abort()
            return
        self._asking[peer] += 1
        try:
            async with asyncio.timeout(ASKING_SECONDS):
                await stream.write(self._answer_to(peer, await _receive(stream, peer, Ask)))
                with contextlib.suppress(EOFError):
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
            key = self.listener.offer(peer, ask.protocol, ask.key, is_spare=ask.is_spare)
            return _message(Offer(self.listener.port, key))
        except ValueError as error:
            return frames.error_frame(str(error))


async def _tcp(connection: SealedSocket, host: str, port: int) -> None:
    async with asyncio.timeout(TCP_SECONDS):
        await asyncio.get_running_loop().create_connection(lambda: connection, host, port)


async def _has_begun(connection: SealedSocket, timeout_seconds: float) -> bool:
    """Begin a stream once the listener is READY; abort the connection, and return False, if it is not in time."""
    try:
        async with asyncio.timeout(timeout_seconds):
            await connection.expect(Kind.READY)
        connection.begin()
    except BaseException as error:
        connection.abort()
        if not isinstance(error, (OSError, EOFError, TimeoutError)):
            raise
        logger.debug("a direct connection is not used again: %r", error)
        return False
    return True


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
