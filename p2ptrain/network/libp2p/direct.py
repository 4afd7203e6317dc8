"""Direct connections: TCP and TLS 1.3 from process to process, for streams that carry much.

Between two daemons bytes pass through four processes' sockets and are encrypted by the daemons; a direct connection
leaves the daemons out. Peers agree on one over a stream between their daemons, which has authenticated both::

    dialler                                                    listener
      | over the daemons: {protocol, certificate}                |
      | -------------------------------------------------------> |  makes an offer (`DirectListener.offer`)
      |                 {port, certificate, token}               |
      | <------------------------------------------------------- |
      | TCP to an address of the connection between the daemons  |
      | TLS 1.3: both present exactly the certificates named     |
      | token --------------------------------------> ACCEPTED   |
      | START, and the stream begins                             |

What a relay carries, who listens nowhere, and whoever cannot be dialled stays with the daemons:
`DirectConnections.open` returns None then, at once for a while after a failure. One connection carries one stream at a
time. As making one takes several round trips and milliseconds of CPU, one whose stream ended in order is kept for a
minute: the listener writes ACCEPTED once it is through with that stream, too, and START begins the next.

The security argument is in ``docs/architecture.md`` ("Direct connections").
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from p2ptrain.errors import ProtocolError
from p2ptrain.network.libp2p.control import DaemonControl, DaemonGone, DaemonRefusal
from p2ptrain.network.libp2p.direct_listener import (
    ACCEPTED,
    START,
    TOKEN_BYTES,
    DirectLimits,
    DirectListener,
    OfferRefusedError,
    server_name,
)
from p2ptrain.network.libp2p.direct_tls import MAX_CERTIFICATE_BYTES, Certificate, TlsSocket, check_certificate
from p2ptrain.network.libp2p.socket_stream import SocketStream
from p2ptrain.network.reachability import host_of, scope
from p2ptrain.network.rpc.frames import FRAME, Kind, frame, pack, unpack
from p2ptrain.network.transport import PeerId
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)

OFFERS = "/p2ptrain/direct/1"
"""The name of the streams over which offers are asked for."""

MAX_MESSAGE_BYTES = 2 * MAX_CERTIFICATE_BYTES
ASKING_SECONDS = 5.0
"""For a peer that asks for an offer to say so."""
MAX_ASKING = 64
MAX_ASKING_PER_PEER = 4

DIAL_SECONDS = 3.0
"""From asking for an offer to a connection that is accepted; the daemons take over after that."""
TCP_SECONDS = 1.0
"""A port that is filtered does not answer at all; one retransmission fits in, if only just."""
MAX_HOSTS = 2
MAX_SPARES = 32
FIRST_REST_SECONDS = 30.0
LONGEST_REST_SECONDS = 900.0
MAX_RESTS = 1024


@dataclass(frozen=True)
class _Rest:
    """How long a peer that could not be dialled is not dialled."""

    until: float
    seconds: float


class _CannotDialError(Exception):
    """No direct connection comes about; the message says why."""


class DirectConnections:
    """Dials peers directly, and listens for those that do.

    Args:
        control: Reaches peers over the daemon.
        on_stream: Called with peer, protocol and connection when a peer begins a stream.
        served: The protocols that peers may open streams for.
        limits: Bounds.

    Attributes:
        num_dialled: Connections made so far.
    """

    def __init__(
        self,
        control: DaemonControl,
        on_stream: Callable[[PeerId, str, TlsSocket], None],
        served: Collection[str],
        limits: DirectLimits | None = None,
    ) -> None:
        self.num_dialled = 0
        self._limits = limits or DirectLimits()
        self._control = control
        self._on_stream = on_stream
        self._served = served
        self._certificate = Certificate()
        self._listener: DirectListener | None = None
        self._asking: Counter[PeerId] = Counter()
        self._spares: dict[tuple[PeerId, str], tuple[TlsSocket, asyncio.TimerHandle]] = {}
        self._tasks = Tasks()
        self._preparing: dict[tuple[PeerId, str], asyncio.Task[None]] = {}
        self._rests: dict[PeerId, _Rest] = {}
        self._closed = False

    @property
    def refusals(self) -> Counter[str]:
        """How often something was refused at the port, by cause."""
        return self._listener.refusals if self._listener is not None else Counter()

    @property
    def port(self) -> int:
        """Where this peer listens; 0 if nowhere."""
        return self._listener.port if self._listener is not None else 0

    @property
    def num_spares(self) -> int:
        """Connections that wait for the next stream."""
        return len(self._spares)

    async def start(self, hosts: Sequence[str], port: int) -> None:
        """Listen at a port of ``hosts`` (IP addresses; if there are any), and answer peers that ask for offers.

        Raises:
            ResourceError: The port is taken.
            DaemonGone, DaemonRefusal: The daemon does not take part.
        """
        if hosts:
            self._listener = DirectListener(self._certificate, hosts, port, self._on_stream, self._limits)
        await self._control.serve_stream(OFFERS, self._answer)

    async def close(self) -> None:
        """End all connections; idempotent."""
        self._closed = True
        await self._tasks.close()
        for key in list(self._spares):
            self._drop(key)
        if self._listener is not None:
            await self._listener.close()

    # Dialling

    async def open(self, peer: PeerId, protocol: str, timeout_seconds: float) -> TlsSocket | None:
        """A connection whose other end runs the handler of ``protocol``; None where there is none to be had in time."""
        loop, key = asyncio.get_running_loop(), (peer, protocol)
        deadline = loop.time() + min(DIAL_SECONDS, timeout_seconds)
        preparing = self._preparing.get(key)
        if preparing is not None:
            await asyncio.wait([preparing], timeout=deadline - loop.time())
        connection = self._drop(key, is_taken=True)
        rest = self._rests.get(peer)
        if connection is None and rest is not None and loop.time() < rest.until:
            return None
        try:
            if connection is None:
                connection = await self._dial(peer, protocol, deadline - loop.time())
            if connection is None:
                return None
            await connection.write(START)
        except OSError:  # it ended a moment ago
            return None
        connection.on_rest = partial(self._take_back, key, connection)
        return connection

    def _take_back(self, key: tuple[PeerId, str], connection: TlsSocket) -> bool:
        """Keep a connection on which a stream has ended for the next one; False if there is no need for it."""
        if self._closed or connection.num_unread > len(ACCEPTED) or key in self._preparing or key in self._spares:
            return False
        if len(self._spares) + len(self._preparing) >= MAX_SPARES:
            return False
        task = self._tasks.start(self._prepare(key, connection), f"direct-spare-{key[0][-8:]}")
        self._preparing[key] = task
        task.add_done_callback(lambda _: self._preparing.pop(key, None))
        return True

    async def _dial(self, peer: PeerId, protocol: str, timeout_seconds: float) -> TlsSocket | None:
        """A new connection; None, and the peer rests, when there is none to be had."""
        try:
            async with asyncio.timeout(timeout_seconds):
                hosts = await self._hosts_of(peer)
                if not hosts:
                    return None  # a relay is between, for now, or there is no connection yet
                offer = await self._ask(peer, protocol)
                connection = await self._connect(hosts, offer)
        except (_CannotDialError, OSError, EOFError, TimeoutError, DaemonGone, DaemonRefusal, ProtocolError) as error:
            self._rest(peer, str(error) or "no answer in time")
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

    async def _ask(self, peer: PeerId, protocol: str) -> tuple[int, bytes, bytes]:
        """Port, certificate and token of an offer."""
        stream = await self._control.open_stream(peer, OFFERS)
        try:
            await _send(stream, {"protocol": protocol, "certificate": self._certificate.der})
            reply = await _receive(stream, peer)
        finally:
            stream.abort()
        port, token = reply.get("port"), reply.get("token")
        if "reason" in reply:
            raise _CannotDialError(f"the peer says: {str(reply['reason'])[:100]}")
        if type(port) is not int or not 0 < port < 65536 or not isinstance(token, bytes) or len(token) != TOKEN_BYTES:
            raise _CannotDialError("the peer sent a malformed offer")
        try:
            return port, check_certificate(reply.get("certificate")), token
        except ValueError as error:
            raise _CannotDialError(f"the peer sent {error}") from error

    async def _connect(self, hosts: Sequence[str], offer: tuple[int, bytes, bytes]) -> TlsSocket:
        """Dial ``hosts`` in turn."""
        refusal = ""
        for host in hosts:
            try:
                return await self._connect_to(host, *offer)
            except (OSError, EOFError, TimeoutError) as error:
                refusal = f"{host} port {offer[0]}: {error or 'no answer in time'}"
        raise _CannotDialError(refusal)

    async def _connect_to(self, host: str, port: int, certificate: bytes, token: bytes) -> TlsSocket:
        context = self._certificate.context(certificate, is_server=False)
        connection, is_accepted = TlsSocket(), False
        try:
            connected = await _tcp(host, port)
            await asyncio.get_running_loop().create_connection(
                lambda: connection, sock=connected, ssl=context, server_hostname=server_name(token),
                ssl_handshake_timeout=2 * DIAL_SECONDS,
            )  # fmt: skip
            if connection.remote_certificate != certificate:
                raise _CannotDialError("the listener presents another certificate than the peer named")
            await connection.write(token)
            is_accepted = await connection.read(len(ACCEPTED)) == ACCEPTED
            if not is_accepted:
                raise _CannotDialError("the listener does not accept its own offer")
            return connection
        finally:
            if not is_accepted:
                connection.abort()

    def _rest(self, peer: PeerId, reason: str) -> None:
        """Leave a peer to the daemons for a while, and for longer every time."""
        before = self._rests.pop(peer, None)
        seconds = FIRST_REST_SECONDS if before is None else min(2 * before.seconds, LONGEST_REST_SECONDS)
        while len(self._rests) >= MAX_RESTS:
            del self._rests[next(iter(self._rests))]
        self._rests[peer] = _Rest(asyncio.get_running_loop().time() + seconds, seconds)
        logger.info("peer %s is not reached directly, but through the daemon: %s", peer[-8:], reason)

    # Connections that are used again

    async def _prepare(self, key: tuple[PeerId, str], connection: TlsSocket) -> None:
        """Wait until the other end is through with the last stream, too."""
        is_ready = False
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                is_ready = await connection.read(len(ACCEPTED)) == ACCEPTED
        except (OSError, EOFError, TimeoutError) as error:
            logger.debug("a direct connection to peer %s is not used again: %s", key[0][-8:], error)
        finally:
            if not is_ready:
                connection.abort()
        if is_ready:
            timer = asyncio.get_running_loop().call_later(self._limits.spare_seconds, self._drop, key)
            self._spares[key] = (connection, timer)

    def _drop(self, key: tuple[PeerId, str], *, is_taken: bool = False) -> TlsSocket | None:
        """Take the spare connection out, and end it unless somebody takes it; None if there is no living one."""
        connection, timer = self._spares.pop(key, (None, None))
        if timer is not None:
            timer.cancel()
        if connection is not None and not is_taken:
            connection.abort()
        return connection if connection is not None and not connection.is_closing else None

    # Answering

    async def _answer(self, peer: PeerId, stream: SocketStream) -> None:
        """A peer asks for an offer."""
        if self._closed or self._asking[peer] >= MAX_ASKING_PER_PEER or self._asking.total() >= MAX_ASKING:
            stream.abort()
            return
        self._asking[peer] += 1
        try:
            async with asyncio.timeout(ASKING_SECONDS):
                await _send(stream, self._offer(peer, await _receive(stream, peer)))
                await stream.read(1)  # until the asker ends the stream: closing first could lose the answer
        except (OSError, EOFError, TimeoutError, ProtocolError) as error:
            logger.debug("peer %s asked for no offer: %r", peer[-8:], error)
        finally:
            stream.abort()
            self._asking[peer] -= 1
            if not self._asking[peer]:
                del self._asking[peer]

    def _offer(self, peer: PeerId, request: dict[str, Any]) -> dict[str, Any]:
        protocol, listener = request.get("protocol"), self._listener
        if listener is None:
            return {"reason": "this peer does not listen for direct connections"}
        if not isinstance(protocol, str) or protocol not in self._served:
            return {"reason": "this peer does not serve that"}
        try:
            token = listener.offer(peer, protocol, check_certificate(request.get("certificate")))
        except (ValueError, OfferRefusedError) as error:
            return {"reason": str(error)}
        return {"port": listener.port, "certificate": self._certificate.der, "token": token}


async def _send(stream: SocketStream, message: object) -> None:
    await stream.write(frame(Kind.MESSAGE, pack(message)))


async def _receive(stream: SocketStream, peer: PeerId) -> dict[str, Any]:
    """One message; raises `ProtocolError` when it is something else, or too long."""
    length, kind = FRAME.unpack(await stream.read(FRAME.size))
    if kind != Kind.MESSAGE or length > MAX_MESSAGE_BYTES:
        raise ProtocolError(peer, f"sent a frame of kind {kind} and {length} bytes where an offer was due")
    return unpack(await stream.read(length), peer, dict)


async def _tcp(host: str, port: int) -> socket.socket:
    """A TCP connection within `TCP_SECONDS`."""
    connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        async with asyncio.timeout(TCP_SECONDS):
            await asyncio.get_running_loop().sock_connect(connection, (host, port))
    except BaseException:
        connection.close()
        raise
    return connection
