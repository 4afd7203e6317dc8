"""`Transport` on libp2p: raw streams through this peer's own p2pd daemon.

The daemon does encryption, dialling, NAT traversal and relaying; each stream is one Unix socket to it. Streams with
much data, and those to peers that get several, bypass the daemon where possible (`direct`). Errors of the daemon and
the operating system become errors of `p2ptrain.errors`.

Data in flight when a side closes may be lost. The layer above marks ends and waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Literal

from p2ptrain.errors import (
    NotListeningError,
    PeerLostError,
    PeerUnreachableError,
    ResourceError,
    TemporaryError,
    WrongPeerError,
)
from p2ptrain.network.identity import Identity
from p2ptrain.network.libp2p.control import DaemonControl, DaemonGone, DaemonRefusal
from p2ptrain.network.libp2p.daemon import Daemon
from p2ptrain.network.libp2p.direct import DirectConnections
from p2ptrain.network.libp2p.settings import Libp2pSettings
from p2ptrain.network.libp2p.socket_stream import SocketStream
from p2ptrain.network.libp2p.wrong_peers import WrongPeers
from p2ptrain.network.link import check_peer_address
from p2ptrain.network.reachability import Scope, answering, scope
from p2ptrain.network.transport import PeerId, Stream, StreamHandler, Transport
from p2ptrain.tasks import Tasks

__all__ = ["Libp2pSettings", "Libp2pTransport", "Reachability"]

logger = logging.getLogger(__name__)

REQUEST_SECONDS = 5.0
"""Timeout of requests that the daemon answers without other peers."""
FIRST_REQUEST_SECONDS = 20.0
"""The same for the first requests to a new daemon, which takes longer on a busy machine."""
REDIAL_SECONDS = 5.0
"""Interval and timeout of dials to the bootstrap peers while no peer is connected."""
STREAM_CLOSE_SECONDS = 5.0

Reachability = Literal["direct", "relay", "unknown"]


class PeerStream(Stream):
    """A stream on one socket; it maps socket errors to `PeerLostError`.

    ``on_end`` is called after this end has closed the stream, possibly repeatedly; its second argument is True if it
    was not closed in order.
    """

    def __init__(self, remote: PeerId, socket: SocketStream, on_end: Callable[[PeerStream, bool], None]) -> None:
        self.remote = remote
        self._on_end = on_end
        self._socket = socket
        self._closed = False
        self._is_given_back = False

    @property
    def num_arrived(self) -> int:
        return self._socket.num_arrived

    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        if self._closed or self._socket.is_closing:
            raise PeerLostError(self.remote, "the stream is closed; open another")
        try:
            await self._socket.write(*parts)
        except (OSError, RuntimeError) as error:
            raise PeerLostError(self.remote, "the stream broke while writing; open another") from error

    async def read_into(self, view: memoryview) -> None:
        try:
            await self._socket.read_into(view)
        except (OSError, EOFError) as error:
            raise PeerLostError(self.remote, "the stream ended before what was expected; open another") from error

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            async with asyncio.timeout(STREAM_CLOSE_SECONDS):
                await self._socket.close()
        except (OSError, RuntimeError, TimeoutError):
            self._socket.abort()
        except BaseException:
            self._socket.abort()
            raise
        finally:
            self._on_end(self, False)

    async def rest(self) -> None:
        if not self._closed and self._socket.rest():
            self._closed = self._is_given_back = True
            self._on_end(self, False)
        else:
            await self.close()

    def abort(self) -> None:
        is_broken, self._closed = not self._closed, True
        if not self._is_given_back:
            self._socket.abort()
        self._on_end(self, is_broken)


class Libp2pTransport(Transport):
    """Streams through a daemon that this object owns.

    If the daemon dies, all streams break, `open` raises, and this object calls the `on_lost` callback. The owner then
    closes it and may start another.
    """

    def __init__(self, daemon: Daemon, control: DaemonControl, settings: Libp2pSettings, peer_id: PeerId) -> None:
        self.settings = settings
        self.daemon = daemon
        self.control = control
        self._lost_reason = ""
        self.peer_id = peer_id
        self._on_lost: Callable[[str], None] | None = None
        self._streams: set[PeerStream] = set()
        self._tasks = Tasks()
        self._serving = Tasks()
        self._wrong_peers = WrongPeers()
        self._handlers: dict[str, StreamHandler] = {}
        self.direct = DirectConnections(peer_id, control, self._accept, self._handlers.keys())
        self._closed = False

    @classmethod
    async def start(cls, identity: Identity, settings: Libp2pSettings | None = None) -> Libp2pTransport:
        """Start a daemon with this identity, and dial bootstrap peers in the background with retries.

        The daemon dies with the calling thread. Raises `ResourceError` if it does not start, or a port is taken.
        """
        settings = settings or Libp2pSettings()
        daemon = await Daemon.start(settings, identity.libp2p_key())
        control = DaemonControl(daemon.control_socket, daemon.own_socket)
        transport = cls(daemon, control, settings, identity.peer_id)
        try:
            async with asyncio.timeout(FIRST_REQUEST_SECONDS):
                await control.hold()
                peer_id, _ = await control.identify()
            if peer_id != identity.peer_id:
                raise ResourceError(f"the network daemon took {peer_id} from {identity.where}: make a new identity")
            daemon.watch(transport._daemon_lost)
            if settings.direct != "off":
                async with asyncio.timeout(FIRST_REQUEST_SECONDS):
                    await transport.direct.start(settings.direct_hosts, settings.direct_port)
        except BaseException as error:
            await transport.close()
            if isinstance(error, (DaemonGone, DaemonRefusal, TimeoutError)):
                reason = f"the network daemon does not answer after its start ({error}): try again"
                raise ResourceError(reason) from error
            raise
        if settings.bootstrap:
            transport._tasks.keep(transport._keep_connected, "bootstrap-dialler")
        return transport

    @property
    def num_refused(self) -> int:
        return self.direct.refusals.total()

    def on_lost(self, callback: Callable[[str], None]) -> None:
        self._on_lost = callback
        if self._lost_reason:
            callback(self._lost_reason)

    async def open(self, peer: PeerId, protocol: str, timeout_seconds: float, *, expected_bytes: int = 0) -> Stream:
        socket: SocketStream | None = None
        with self._mapped(peer):
            async with asyncio.timeout(timeout_seconds):
                if self.settings.direct != "off":
                    is_large = expected_bytes >= self.settings.direct_from_bytes
                    socket = await self.direct.open(peer, protocol, timeout_seconds / 2, is_large=is_large)
                if socket is None:
                    socket = await self.control.open_stream(peer, protocol)
        return self._stream(peer, socket)

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        async def accept(peer: str, socket: SocketStream) -> None:
            self._accept(peer, protocol, socket)

        self._handlers[protocol] = handler
        with self._mapped(self.peer_id):
            async with asyncio.timeout(REQUEST_SECONDS):
                await self.control.serve_stream(protocol, accept)

    def _accept(self, peer: PeerId, protocol: str, socket: SocketStream) -> None:
        if len(self._serving) >= self.settings.max_streams or self._closed:
            socket.abort()
            return
        stream = self._stream(peer, socket)
        self._serving.start(_handle(stream, self._handlers[protocol]), f"stream-{protocol}-{peer[-8:]}")

    async def connect(self, addresses: Sequence[str], timeout_seconds: float) -> PeerId:
        by_peer: dict[str, list[str]] = {}
        for address in addresses:
            by_peer.setdefault(check_peer_address(address), []).append(address)
        if not by_peer:
            raise PeerUnreachableError("?", "there is no address to dial: ask for a new swarm link")

        async def dial(peer: PeerId) -> PeerId:
            if peer == self.peer_id:
                return peer
            found, refusals = await answering(by_peer[peer])
            if not found:
                raise NotListeningError(peer, f"none of its addresses answers ({_first_line('; '.join(refusals))})")
            try:
                await self.control.connect(peer, found)
            except DaemonRefusal as error:
                holder = self._wrong_peers.holder(peer, str(error))
                if holder is None or refusals:
                    raise
                raise WrongPeerError(peer, holder) from error
            return peer

        errors: list[DaemonRefusal | NotListeningError | WrongPeerError] = []
        async with Tasks() as tasks:
            dials = {tasks.call(dial(peer), f"dial-{peer[-8:]}") for peer in by_peer}
            with self._mapped(next(iter(by_peer))):
                async with asyncio.timeout(timeout_seconds):
                    for attempt in asyncio.as_completed(dials):
                        try:
                            return await attempt
                        except (DaemonRefusal, NotListeningError, WrongPeerError) as error:
                            errors.append(error)
            for each in errors:
                if isinstance(each, DaemonRefusal):
                    reason = f"none of its addresses answers ({_first_line(str(each))})"
                    raise PeerUnreachableError(next(iter(by_peer)), reason) from each
            raise next((each for each in errors if isinstance(each, NotListeningError)), errors[0])

    async def connected_peers(self) -> list[PeerId]:
        """Return the connected peers; raise `TemporaryError` if the daemon does not answer."""
        async with self._requesting():
            return await self.control.connected_peers()

    async def connections(self) -> list[tuple[PeerId, str]]:
        """Return the remote peer and multiaddr of each connection; raise as `connected_peers`."""
        async with self._requesting():
            return await self.control.connections()

    async def hosts_of(self, peer: PeerId) -> list[str]:
        """As `Transport.hosts_of`; raise as `connected_peers`."""
        async with self._requesting():
            return await self.direct.hosts_of(peer)

    async def reserved_relays(self) -> set[PeerId]:
        """Return the relays with a reservation of the daemon; raise as `connected_peers`.

        The daemon reports only relays with public addresses.
        """
        async with self._requesting():
            _, found = await self.control.identify()
        circuits = [address.partition("/p2p-circuit")[0] for address in found if "/p2p-circuit" in address]
        return {relay.rpartition("/p2p/")[2] for relay in circuits}

    async def disconnect(self, peer: PeerId) -> None:
        """Close all connections with ``peer``; raise as `connected_peers`."""
        async with self._requesting():
            await self.control.disconnect(peer)

    async def addresses(self) -> list[str]:
        """As `Transport.addresses`, sorted by `Scope`; raise as `connected_peers`."""
        async with self._requesting():
            _, found = await self.control.identify()
            connected = set(await self.control.connected_peers())
        if self.settings.force_reachability == "private":
            # The daemon reserves a slot at its relays at once, but reports only relays with public addresses.
            relays = [relay for relay in self.settings.trusted_relays if check_peer_address(relay) in connected]
            found += [f"{relay}/p2p-circuit" for relay in relays]
        return [f"{address}/p2p/{self.peer_id}" for address in sorted(dict.fromkeys(found), key=scope)]

    async def reachability(self) -> Reachability:
        """Return how other peers can reach this one, judged by the daemon's own addresses.

        * ``relay``: the peer has a relayed address.
        * ``direct``: it has a public or an announced address, or listens on loopback only (a swarm on one machine).
        * ``unknown``: otherwise, and for a private peer without a relay. Only a dial-back by another peer can tell.
        """
        addresses = await self.addresses()
        if any("/p2p-circuit" in address for address in addresses):
            return "relay"
        if self.settings.force_reachability == "private":
            return "unknown"
        if self.settings.announce or self.settings.force_reachability == "public":
            return "direct"
        is_public = any(scope(address) is Scope.PUBLIC for address in addresses)
        listens_on = {scope(address) for address in self.settings.listen}
        return "direct" if is_public or listens_on == {Scope.LOOPBACK} else "unknown"

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await self._serving.close()
        await self._tasks.close()
        for stream in list(self._streams):
            stream.abort()
        await self.direct.close()
        self.daemon.expect_end()
        self.control.close()
        await self.daemon.stop()
        await asyncio.sleep(0)  # let the aborted sockets close

    def _stream(self, peer: PeerId, socket: SocketStream) -> PeerStream:
        stream = PeerStream(peer, socket, self._ended)
        self._streams.add(stream)
        return stream

    def _ended(self, stream: PeerStream, is_broken: bool) -> None:
        self._streams.discard(stream)
        if is_broken:
            self.direct.forget(stream.remote)

    def _daemon_lost(self, reason: str) -> None:
        logger.error("%s", reason)
        self._lost_reason = reason
        for stream in list(self._streams):
            stream.abort()
        if self._on_lost is not None:
            self._on_lost(reason)

    async def _keep_connected(self) -> None:
        """Dial the bootstrap peers now, and again whenever no peer is connected."""
        while True:
            try:
                if not await self.connected_peers():
                    await self.connect(self.settings.bootstrap, timeout_seconds=REDIAL_SECONDS)
            except TemporaryError as error:
                logger.info("no bootstrap peer answers yet: %s", error)
            await asyncio.sleep(REDIAL_SECONDS)

    @contextlib.contextmanager
    def _mapped(self, peer: PeerId) -> Iterator[None]:
        """Map errors of the daemon and the operating system to `PeerUnreachableError`."""
        try:
            yield
        except DaemonRefusal as error:
            raise PeerUnreachableError(peer, f"cannot be reached ({_first_line(str(error))})") from error
        except TimeoutError as error:
            raise PeerUnreachableError(peer, "does not answer within the time allowed") from error
        except (DaemonGone, OSError, ValueError) as error:
            raise PeerUnreachableError(peer, self._lost_reason or str(error)) from error

    @contextlib.asynccontextmanager
    async def _requesting(self) -> AsyncIterator[None]:
        """Set the timeout of requests to the daemon, and map its errors to `TemporaryError`."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                yield
        except (DaemonRefusal, DaemonGone, OSError, TimeoutError, ValueError) as error:
            reason = self._lost_reason or str(error) or "no answer in time"
            raise TemporaryError(f"the network daemon does not answer ({reason}): restart this peer") from error


async def _handle(stream: PeerStream, handler: StreamHandler) -> None:
    try:
        await handler(stream)
    except BaseException as error:
        stream.abort()
        if isinstance(error, Exception):
            logger.warning("stream of peer %s failed: %r", stream.remote[-8:], error)
            return
        raise
    await stream.close()


def _first_line(text: str) -> str:
    return " ".join(text.split())[:200]
