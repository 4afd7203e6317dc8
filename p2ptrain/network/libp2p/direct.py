"""Direct connections: encrypted records over TCP from process to process, for streams that carry much.

Bytes between two daemons pass through the sockets of four processes; a direct connection leaves the daemons out. Peers
agree on one over a stream between their daemons, which authenticates both::

    dialler                                                    listener
      | over the daemons: Ask(protocol, key)                     |
      | -------------------------------------------------------> |  `DirectListener.offer`
      |                 Offer(port, key), or an ERROR |
      | <------------------------------------------------------- |
      | TCP to an address of the connection between the daemons  |
      | name, READY -------------------------------------> READY |
      | START, and the stream begins                             |

Name and keys are derived from the two ends' keys for this connection (`p2ptrain.network.libp2p.direct_records`). If no
connection comes about, `DirectConnections.open` returns None, and does so at once for some time.

A connection carries one stream at a time. After a stream that ended in order it is kept for a minute: the listener
sends READY again, and START begins the next stream. ``docs/explanation/security.md`` has the security argument.
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

from p2ptrain.errors import PeerError, PeerRefusedError, PeerUnreachableError, ProtocolError
from p2ptrain.network.libp2p.control import DaemonControl, DaemonGone, DaemonRefusal
from p2ptrain.network.libp2p.direct_listener import DirectLimits, DirectListener, OfferRefusedError
from p2ptrain.network.libp2p.direct_records import Kind, SealedSocket, agree
from p2ptrain.network.libp2p.socket_stream import SocketStream
from p2ptrain.network.reachability import Port, host_of, scope
from p2ptrain.network.rpc import frames
from p2ptrain.network.schema import Message
from p2ptrain.network.transport import PeerId

T = TypeVar("T")

logger = logging.getLogger(__name__)

OFFERS = "/p2ptrain/direct/2"
"""The name of the streams over which offers are asked for."""

ASKING_SECONDS = 5.0
"""Deadline for a peer to ask, and to take the answer."""
MAX_ASKING = 64
MAX_ASKING_PER_PEER = 4

DIAL_SECONDS = 3.0
"""Deadline for a connection that is ready; the daemons carry the stream otherwise."""
TCP_SECONDS = 1.0
"""A filtered port does not answer; one retransmission fits in, if only just."""
READY_SECONDS = 1.0
"""Deadline for the listener to be through with the last stream; a new connection is dialled otherwise."""
MAX_HOSTS = 2
MAX_SPARES = 32
FIRST_REST_SECONDS = 30.0
LONGEST_REST_SECONDS = 900.0
MAX_RESTS = 1024


PublicKey = Annotated[bytes, Meta(min_length=32, max_length=32)]
"""Of X25519, made for one connection."""


class Ask(Message, frozen=True):
    """Request for an offer to open streams of a protocol."""

    protocol: Annotated[str, Meta(max_length=128)]
    key: PublicKey


class Offer(Message, frozen=True):
    """Permission to connect to a port once, within `DirectLimits.offer_seconds`."""

    port: Port
    key: PublicKey


class DirectConnections:
    """Dials peers directly, and listens for those that do.

    Args:
        own_id: This peer's id.
        control: Reaches peers over the daemon.
        on_stream: Called with peer, protocol and connection when a peer begins a stream.
        served: The protocols that peers may open streams for.
        limits: Bounds.

    Attributes:
        num_dialled: Connections made so far.
    """

    def __init__(
        self,
        own_id: PeerId,
        control: DaemonControl,
        on_stream: Callable[[PeerId, str, SealedSocket], None],
        served: Collection[str],
        limits: DirectLimits | None = None,
    ) -> None:
        self.num_dialled = 0
        self._own_id = own_id
        self._limits = limits or DirectLimits()
        self._control = control
        self._on_stream = on_stream
        self._served = served
        self._listener: DirectListener | None = None
        self._asking: Counter[PeerId] = Counter()
        self._spares: dict[tuple[PeerId, str], tuple[SealedSocket, asyncio.TimerHandle]] = {}
        self._rests: dict[PeerId, tuple[float, float]] = {}
        self._closed = False

    @property
    def refusals(self) -> Counter[str]:
        """How often something was refused at the port, by cause."""
        return self._listener.refusals if self._listener is not None else Counter()

    @property
    def port(self) -> int:
        """Where this peer listens; 0 if nowhere."""
        return self._listener.port if self._listener is not None else 0

    async def start(self, hosts: Sequence[str], port: int) -> None:
        """Listen at a port of ``hosts`` (IP addresses; if there are any), and answer peers that ask for offers.

        Raises:
            ResourceError: The port is taken.
            DaemonGone, DaemonRefusal: The daemon does not take part.
        """
        if hosts:
            self._listener = DirectListener(self._own_id, hosts, port, self._on_stream, self._limits)
        await self._control.serve_stream(OFFERS, self._answer)

    async def close(self) -> None:
        """End all connections; idempotent."""
        self._closed = True
        for key in list(self._spares):
            self._drop(key)
        if self._listener is not None:
            await self._listener.close()

    # Dialling

    async def open(self, peer: PeerId, protocol: str, timeout_seconds: float) -> SealedSocket | None:
        """A connection whose other end runs the handler of ``protocol``; None where there is none to be had in time."""
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
        until, _ = self._rests.get(peer, (0.0, 0.0))
        return None if loop.time() < until else await self._dial(peer, protocol, deadline - loop.time())

    def _take_back(self, key: tuple[PeerId, str], connection: SealedSocket) -> bool:
        """Keep a connection on which a stream has ended for the next one; False if there is no need for it."""
        if self._closed or key in self._spares or len(self._spares) >= MAX_SPARES:
            return False
        timer = asyncio.get_running_loop().call_later(self._limits.spare_seconds, self._drop, key)
        self._spares[key] = (connection, timer)
        return True

    def _drop(self, key: tuple[PeerId, str]) -> None:
        connection, timer = self._spares.pop(key)
        timer.cancel()
        connection.abort()

    async def _dial(self, peer: PeerId, protocol: str, timeout_seconds: float) -> SealedSocket | None:
        """A stream on a new connection; None, and the peer rests, when there is none to be had."""
        try:
            async with asyncio.timeout(timeout_seconds):
                hosts = await self._hosts_of(peer)
                if not hosts:
                    return None  # a relay is between, for now, or there is no connection yet
                connection = await self._connect(hosts, peer, protocol)
        except (PeerError, OSError, EOFError, TimeoutError, DaemonGone, DaemonRefusal) as error:
            self._rest(peer, error.reason if isinstance(error, PeerError) else str(error) or "no answer in time")
            return None
        self._rests.pop(peer, None)
        self.num_dialled += 1
        return connection

    async def _hosts_of(self, peer: PeerId) -> list[str]:
        """The IP addresses at which the daemon is connected with ``peer`` now, the nearest first.

        No others are dialled, so that a peer cannot have this one knock at doors of third parties.
        """
        ways = [address for remote, address in await self._control.connections() if remote == peer]
        near = sorted((address for address in ways if host_of(address)), key=scope, reverse=True)
        return list(dict.fromkeys(map(host_of, near)))[:MAX_HOSTS]

    async def _connect(self, hosts: Sequence[str], peer: PeerId, protocol: str) -> SealedSocket:
        """Ask for an offer, and dial ``hosts`` in turn."""
        private = X25519PrivateKey.generate()
        own_key = private.public_key().public_bytes_raw()
        offer = await self._ask(peer, Ask(protocol, own_key))
        try:
            name, sealing, opening = agree(private, offer.key, self._own_id, peer, protocol, own_key, offer.key)
        except ValueError as error:
            raise ProtocolError(peer, "sent a key that is none") from error
        # All hosts get the same first bytes, and only one that answers gets more: no nonce is used for two records.
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
        """Leave a peer to the daemons for a while, and for longer every time."""
        _, before = self._rests.pop(peer, (0.0, FIRST_REST_SECONDS / 2))
        seconds = min(2 * before, LONGEST_REST_SECONDS)
        while len(self._rests) >= MAX_RESTS:
            del self._rests[next(iter(self._rests))]
        self._rests[peer] = (asyncio.get_running_loop().time() + seconds, seconds)
        logger.info("peer %s is not reached directly, but through the daemon: %s", peer[-8:], reason)

    # Answering

    async def _answer(self, peer: PeerId, stream: SocketStream) -> None:
        """A peer asks for an offer."""
        if self._closed or self._asking[peer] >= MAX_ASKING_PER_PEER or self._asking.total() >= MAX_ASKING:
            stream.abort()
            return
        self._asking[peer] += 1
        try:
            async with asyncio.timeout(ASKING_SECONDS):
                await stream.write(self._answer_to(peer, await _receive(stream, peer, Ask)))
                await stream.read(1)  # until the asker ends the stream: closing first could lose the answer
        except (OSError, EOFError, TimeoutError, PeerError) as error:
            logger.debug("peer %s asked for no offer: %r", peer[-8:], error)
        finally:
            stream.abort()
            self._asking[peer] -= 1
            if not self._asking[peer]:
                del self._asking[peer]

    def _answer_to(self, peer: PeerId, ask: Ask) -> bytes:
        if self._listener is None:
            return frames.error_frame("this peer does not listen for direct connections")
        if ask.protocol not in self._served:
            return frames.error_frame("this peer does not serve that")
        try:
            return _message(Offer(self._listener.port, self._listener.offer(peer, ask.protocol, ask.key)))
        except (ValueError, OfferRefusedError) as error:
            return frames.error_frame(str(error))


async def _tcp(connection: SealedSocket, host: str, port: int) -> None:
    async with asyncio.timeout(TCP_SECONDS):
        await asyncio.get_running_loop().create_connection(lambda: connection, host, port)


async def _begin(connection: SealedSocket, hello: bytes = b"") -> SealedSocket:
    """Begin a stream once the other end is ready; ends the connection when it raises."""
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
    """Return one message; raises `PeerRefusedError` for an ERROR, and `ProtocolError` for anything else."""
    length, kind = frames.FRAME.unpack(await stream.read(frames.FRAME.size))
    if kind not in (frames.Kind.MESSAGE, frames.Kind.ERROR) or length > frames.MAX_REASON_BYTES:
        raise ProtocolError(peer, f"sent a frame of kind {kind} and {length} bytes where an offer was due")
    data = await stream.read(length)
    if kind == frames.Kind.ERROR:
        raise PeerRefusedError(peer, frames.unpack(data, peer, frames.Refusal).reason)
    return frames.unpack(data, peer, schema)
