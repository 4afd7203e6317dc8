"""Client of a p2pd daemon's control socket: identify, dial, open and serve raw streams.

The protocol has varint-prefixed protobuf messages on a Unix socket, and one connection per request. After STREAM_OPEN
the connection carries the stream. hivemind's client leaks connections of failed requests, and cannot bound buffers.
Source: https://github.com/libp2p/go-libp2p-daemon/blob/master/specs/CONTROL.md
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from hivemind.p2p import PeerID
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr as HivemindMultiaddr
from multiaddr import Multiaddr

from p2ptrain.network.identity import with_length
from p2ptrain.network.libp2p.socket_stream import SocketStream
from p2ptrain.tasks import Tasks

MAX_CONTROL_MESSAGE_BYTES = 4 << 20
MAX_REFUSAL_CHARACTERS = 8192
"""Longest kept error message; a failed dial has one line per address."""

logger = logging.getLogger(__name__)

StreamCallback = Callable[[str, SocketStream], Awaitable[None]]


class DaemonRefusal(Exception):
    """The daemon answered a request with an error, which is the message."""


class DaemonGone(Exception):
    """The daemon's control socket is closed, or sends invalid messages."""


class DaemonControl:
    """Requests to one daemon; ``own_socket`` accepts incoming streams.

    Callers set timeouts. Cancelling a call closes its connection.
    """

    def __init__(self, daemon_socket: Path, own_socket: Path) -> None:
        self._daemon_socket = daemon_socket
        self._own_socket = own_socket
        self._server: asyncio.AbstractServer | None = None
        self._held: SocketStream | None = None
        self._accepting = Tasks()
        self._handlers: dict[str, StreamCallback] = {}

    async def hold(self) -> None:
        """Keep the daemon running until `close` or this process's end; it exits with its last such connection."""
        self._held = await self._connection()
        await _ask(self._held, "PERSISTENT_CONN_UPGRADE")

    async def identify(self) -> tuple[str, list[str]]:
        """Return the daemon's peer id and its own view of its multiaddrs (without ``/p2p``)."""
        response = await self._request("IDENTIFY")
        return PeerID(response.identify.id).to_base58(), _texts(response.identify.addrs)

    async def connect(self, peer: str, addresses: Sequence[str]) -> None:
        """Dial ``peer``; a final ``/p2p/<peer>`` of an address is optional."""
        raw = [Multiaddr(address.removesuffix(f"/p2p/{peer}")).to_bytes() for address in addresses]
        connect = p2pd_pb2.ConnectRequest(peer=_peer_bytes(peer), addrs=raw)
        await self._request("CONNECT", connect=connect)

    async def disconnect(self, peer: str) -> None:
        await self._request("DISCONNECT", disconnect=p2pd_pb2.DisconnectRequest(peer=_peer_bytes(peer)))

    async def connected_peers(self) -> list[str]:
        return [PeerID(info.id).to_base58() for info in (await self._request("LIST_PEERS")).peers]

    async def connections(self) -> list[tuple[str, str]]:
        """Return the remote's id and multiaddr of each connection."""
        response = await self._request("LIST_PEERS")
        return [(PeerID(info.id).to_base58(), address) for info in response.peers for address in _texts(info.addrs)]

    async def open_stream(self, peer: str, protocol: str) -> SocketStream:
        """Open a stream to ``peer``; the daemon looks up and dials the peer if necessary."""
        stream_open = p2pd_pb2.StreamOpenRequest(peer=_peer_bytes(peer), proto=[protocol])
        socket = await self._connection()
        try:
            await _ask(socket, "STREAM_OPEN", streamOpen=stream_open)
        except BaseException:
            socket.abort()
            raise
        return socket

    async def serve_stream(self, protocol: str, callback: StreamCallback) -> None:
        """Call ``callback(remote peer id, stream)`` in a task for every incoming stream of ``protocol``."""
        if self._server is None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(lambda: SocketStream(self._connected), self._own_socket)
        self._handlers[protocol] = callback
        # py-multiaddr drops the leading slash of Unix sockets; hivemind's multiaddr encodes ``/p2p`` parts wrongly.
        address = HivemindMultiaddr(f"/unix{self._own_socket}").to_bytes()
        handler = p2pd_pb2.StreamHandlerRequest(addr=address, proto=[protocol], balanced=False)
        await self._request("STREAM_HANDLER", streamHandler=handler)

    def close(self) -> None:
        """Stop accepting streams and release the daemon; idempotent."""
        if self._server is not None:
            self._server.close()
        if self._held is not None:
            self._held.abort()

    async def _connection(self) -> SocketStream:
        loop = asyncio.get_running_loop()
        try:
            _, socket = await loop.create_unix_connection(SocketStream, str(self._daemon_socket))
            return socket
        except OSError as error:
            raise DaemonGone(f"the network daemon does not answer ({error.strerror})") from error

    async def _request(self, kind: str, **details: Any) -> Any:
        socket = await self._connection()
        try:
            return await _ask(socket, kind, **details)
        finally:
            socket.abort()

    def _connected(self, socket: SocketStream) -> None:
        self._accepting.start(self._accept(socket), "accept-stream")

    async def _accept(self, socket: SocketStream) -> None:
        try:
            async with asyncio.timeout(5):
                info = p2pd_pb2.StreamInfo.FromString(await _receive(socket))
            peer, handler = PeerID(info.peer).to_base58(), self._handlers[info.proto]
        except (OSError, EOFError, TimeoutError, DecodeError, KeyError, DaemonGone):
            socket.abort()
            return
        await handler(peer, socket)


def _texts(addresses: Sequence[bytes]) -> list[str]:
    texts = []
    for raw in addresses:
        try:
            texts.append(str(Multiaddr(raw)))
        except Exception as error:  # py-multiaddr's codecs raise many kinds for unknown transports
            logger.debug("address %s ignored: %r", raw.hex(), error)
    return texts


def _peer_bytes(peer: str) -> bytes:
    return bytes(PeerID.from_base58(peer).to_bytes())


async def _receive(socket: SocketStream) -> bytes:
    length = shift = 0
    try:
        while True:
            byte = (await socket.read(1))[0]
            length |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                break
            if shift > 28:
                raise DaemonGone("the network daemon sent a length out of range")
        if length > MAX_CONTROL_MESSAGE_BYTES:
            raise DaemonGone("the network daemon sent a message that is too large")
        return await socket.read(length)
    except (OSError, EOFError) as error:
        raise DaemonGone("the network daemon closed its control socket") from error


async def _ask(socket: SocketStream, kind: str, **details: Any) -> Any:
    """Return the daemon's response to a request of a kind that `p2pd_pb2.Request` names, with its fields."""
    request = p2pd_pb2.Request(type=p2pd_pb2.Request.Type.Value(kind), **details)
    try:
        await socket.write(with_length(request.SerializeToString()))
    except OSError as error:
        raise DaemonGone("the network daemon closed its control socket") from error
    try:
        response = p2pd_pb2.Response.FromString(await _receive(socket))
    except DecodeError as error:
        raise DaemonGone("the network daemon sent garbage") from error
    if response.type == p2pd_pb2.Response.ERROR:
        raise DaemonRefusal(response.error.msg[:MAX_REFUSAL_CHARACTERS])
    return response
