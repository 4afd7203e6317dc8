"""Requests, replies and channels between peers, on any `Transport`.

One protocol is served; each stream names what it wants in a header of two frames, ``{protocol, swarm, name}`` and
the request. The first is small, so that a peer of another version, another swarm, or one that asks for a name unknown
here is told so before anything else is read::

    caller                               server
      | {protocol, swarm, name}, request   |
      | ---------------------------------> |  refused: ERROR reason
      |          reply, END                |
      | <--------------------------------- |  (or a conversation, see `Channel`)
      |             ACK                    |
      | ---------------------------------> |

What strangers can cost is bounded: streams per peer and in all, time and bytes until the request is there, and after
that whatever the handler's own deadlines allow. Every refusal is counted by peer and cause.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

from p2ptrain.errors import (
    DeadlineError,
    P2PTrainError,
    PeerError,
    PeerLostError,
    PeerRefusedError,
    PeerUnreachableError,
    ProtocolError,
)
from p2ptrain.manifest import PROTOCOL_VERSION
from p2ptrain.network.channel import Channel, ChannelLimits
from p2ptrain.network.frame_reader import PIECE_BYTES
from p2ptrain.network.frames import (
    FRAME,
    MAX_FRAME_BYTES,
    MAX_MESSAGE_BYTES,
    Kind,
    Message,
    error_frame,
    frame,
    pack,
    unpack,
)
from p2ptrain.network.rates import RateLimit, Traffic
from p2ptrain.network.transport import PeerId, Stream, Transport
from p2ptrain.runtime import Runtime

logger = logging.getLogger(__name__)

PROTOCOL = "/p2ptrain/rpc"
MAX_HEADER_BYTES = 512
MAX_COUNTED_REFUSALS = 4096
MAX_CONCURRENT_REFUSALS = 64

OTHER_PROTOCOL = "protocol "
"""How the refusal of a peer of another version starts; what it says on is which."""
OTHER_SWARM = "another swarm"
"""How the refusal of a peer with another manifest starts."""

RequestHandler = Callable[[PeerId, Message], Awaitable[Message]]
ChannelHandler = Callable[[Channel, Message], Awaitable[None]]


@dataclass(frozen=True)
class RpcLimits:
    """What other peers may use of this one."""

    inbound_streams: int = 1024
    """Streams served at once, from all peers."""
    inbound_streams_per_peer: int = 64
    """Streams served at once for one peer."""
    header_seconds: float = 10.0
    """Time for a new stream to deliver its header and request."""
    up_bytes_per_second: int = 0
    """What all channels together may send, heartbeats apart; 0 sets no limit."""
    down_bytes_per_second: int = 0
    """What all channels together may receive; 0 sets no limit. It holds the senders back."""
    channel: ChannelLimits = field(default_factory=ChannelLimits)


@dataclass(frozen=True)
class _Service:
    handler: Callable[[Channel, Message], Awaitable[None]]
    max_request_bytes: int


class _RefusalError(Exception):
    """An incoming stream is refused: ``cause`` is counted, ``reason`` is told to the peer."""

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause
        self.reason = reason


class Rpc:
    """Calls other peers by name, and answers them.

    Attributes:
        runtime: This peer's time and chance.
        refusals: How often each peer was refused, by cause; a bounded number of peers, the rest under ``"others"``.

    Args:
        transport: Carries the streams; stays the caller's to close.
        runtime: This peer's time and chance.
        swarm: The manifest digest; peers of other swarms are refused.
        limits: What strangers may use of this peer.
        protocol: The version this peer speaks.
    """

    def __init__(
        self,
        transport: Transport,
        runtime: Runtime,
        swarm: bytes,
        limits: RpcLimits | None = None,
        *,
        protocol: int = PROTOCOL_VERSION,
    ) -> None:
        self.runtime = runtime
        self.refusals: Counter[tuple[PeerId, str]] = Counter()
        self._transport = transport
        self._swarm = swarm
        self._limits = limits or RpcLimits()
        self._protocol = protocol
        self._services: dict[str, _Service] = {}
        self._local: dict[str, RequestHandler] = {}
        self._inbound: Counter[PeerId] = Counter()
        self._inbound_tasks: dict[asyncio.Task[None], None] = {}
        self._refusing = 0
        self._traffic = Traffic(
            RateLimit(self._limits.up_bytes_per_second), RateLimit(self._limits.down_bytes_per_second)
        )
        self._closed = False

    @property
    def peer_id(self) -> PeerId:
        """This peer's own id."""
        return self._transport.peer_id

    @property
    def swarm(self) -> bytes:
        """The manifest digest, 32 bytes."""
        return self._swarm

    @property
    def bytes_sent(self) -> int:
        """Bytes of all frames written so far."""
        return self._traffic.sent

    @property
    def bytes_received(self) -> int:
        """Bytes of all frames read so far."""
        return self._traffic.received

    @property
    def num_inbound(self) -> int:
        """Streams that are being served now."""
        return self._inbound.total()

    async def start(self) -> None:
        """Begin to answer; call it after the first names are served."""
        await self._transport.serve(PROTOCOL, self._on_stream)

    async def move(self, transport: Transport) -> None:
        """Go on with another transport of the same peer; the old one is closed, and with it all streams have ended."""
        self._transport = transport
        await self.start()

    async def close(self) -> None:
        """Refuse new streams, cancel the handlers that run, and wait until they are gone; idempotent."""
        self._closed = True
        tasks = [task for task in self._inbound_tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # Serving

    def serve(self, name: str, handler: RequestHandler, *, max_request_bytes: int = 65536) -> None:
        """Answer calls of ``name`` with what ``handler(peer, request)`` returns.

        A handler that raises a `P2PTrainError` refuses with its message. It is cancelled when the caller is gone.
        """

        async def answer(channel: Channel, request: Message) -> None:
            async with _until(channel.lost):
                reply = await handler(channel.remote, request)
            await channel.close(reply)

        self._local[name] = handler
        self._services[name] = _Service(answer, max_request_bytes)

    def serve_channel(self, name: str, handler: ChannelHandler, *, max_request_bytes: int = 65536) -> None:
        """Run ``handler(channel, request)`` for each channel opened for ``name``; the channel closes when it returns.

        A handler that raises a `P2PTrainError` refuses with its message.
        """
        self._services[name] = _Service(handler, max_request_bytes)

    def count_refusal(self, peer: PeerId, cause: str) -> None:
        """Count that ``peer`` was refused for ``cause`` (a short fixed text, not what the peer sent)."""
        key = (peer, cause)
        if key not in self.refusals and len(self.refusals) >= MAX_COUNTED_REFUSALS:
            key = ("others", cause)
        self.refusals[key] += 1

    async def _on_stream(self, stream: Stream) -> None:
        peer = stream.remote
        task = asyncio.current_task()
        assert task is not None
        try:
            self._admit(peer)
        except _RefusalError as refusal:
            await self._refuse_stream(stream, refusal)
            return
        self._inbound[peer] += 1
        self._inbound_tasks[task] = None
        try:
            try:
                service, request = await self._read_header(stream)
            except _RefusalError as refusal:
                await self._refuse_stream(stream, refusal)
                return
            await self._serve(service, request, Channel(stream, self._limits.channel, self._traffic))
        except PeerLostError:
            stream.abort()
        finally:
            del self._inbound_tasks[task]
            self._inbound[peer] -= 1
            if not self._inbound[peer]:
                del self._inbound[peer]

    def _admit(self, peer: PeerId) -> None:
        if self._closed:
            raise _RefusalError("closing", "this peer is leaving")
        if self._inbound[peer] >= self._limits.inbound_streams_per_peer:
            raise _RefusalError("too many streams", "too many streams from this peer: close some first")
        if len(self._inbound_tasks) >= self._limits.inbound_streams:
            raise _RefusalError("busy", "too many streams: try again later")

    async def _read_header(self, stream: Stream) -> tuple[_Service, Message]:
        peer = stream.remote
        try:
            async with asyncio.timeout(self._limits.header_seconds):
                header = unpack(await self._read_message(stream, MAX_HEADER_BYTES), peer)
                service = self._find(header)
                request = unpack(await self._read_message(stream, service.max_request_bytes), peer)
                return service, request
        except TimeoutError:
            raise _RefusalError("slow header", "the header took too long") from None
        except ProtocolError as error:
            raise _RefusalError("malformed header", f"malformed header: {error.reason}") from error

    def _find(self, header: Message) -> _Service:
        protocol, swarm, name = header.get("protocol"), header.get("swarm"), header.get("name")
        if protocol != self._protocol:
            theirs = protocol if isinstance(protocol, int) else "?"
            raise _RefusalError("other protocol", f"{OTHER_PROTOCOL}{theirs}, this peer speaks {self._protocol}")
        if swarm != self._swarm:
            raise _RefusalError("other swarm", f"{OTHER_SWARM}: this peer has another manifest")
        service = self._services.get(name) if isinstance(name, str) else None
        if service is None:
            raise _RefusalError("unknown name", f"{str(name)[:64]!r} is not served by this peer")
        return service

    async def _read_message(self, stream: Stream, max_bytes: int) -> bytes:
        length, kind = FRAME.unpack(await stream.read(FRAME.size))
        if kind != Kind.MESSAGE:
            raise _RefusalError("malformed header", f"malformed header: a frame of kind {kind}")
        if length > max_bytes:
            raise _RefusalError("oversized request", f"a frame of {length} bytes where {max_bytes} are allowed")
        self._traffic.received += FRAME.size + length
        return await stream.read(length) if length else b""

    async def _refuse_stream(self, stream: Stream, refusal: _RefusalError) -> None:
        """Say why, if that costs little, and end the stream."""
        self.count_refusal(stream.remote, refusal.cause)
        logger.debug("refused a stream of peer %s: %s", stream.remote[-8:], refusal.reason)
        if self._refusing >= MAX_CONCURRENT_REFUSALS:
            stream.abort()
            return
        self._refusing += 1
        try:
            async with asyncio.timeout(min(2.0, self._limits.channel.linger_seconds)):
                data = error_frame(refusal.reason)
                await stream.write(data)
                self._traffic.sent += len(data)
                # Closing while the peer still writes could lose the reason: read until it has seen it.
                for _ in range(MAX_FRAME_BYTES // PIECE_BYTES):
                    await stream.read(PIECE_BYTES)
        except (TimeoutError, PeerLostError):
            pass
        finally:
            self._refusing -= 1
            stream.abort()

    async def _serve(self, service: _Service, request: Message, channel: Channel) -> None:
        peer = channel.remote
        try:
            await service.handler(channel, request)
            await channel.close()
        except P2PTrainError as error:
            if isinstance(error, ProtocolError) or not channel.lost.done():
                self.count_refusal(peer, type(error).__name__)
                await channel.refuse(_reason(error))
        except Exception as error:
            if isinstance(error, TimeoutError) and channel.lost.done():
                return  # `_until` cancelled the handler of a caller that is gone.
            logger.exception("a handler failed, peer %s", peer[-8:])
            self.count_refusal(peer, "internal error")
            await channel.refuse("internal error")
        finally:
            await channel.abort_and_wait()

    # Calling

    async def call(
        self,
        peer: PeerId,
        name: str,
        request: Message,
        timeout_seconds: float,
        *,
        max_reply_bytes: int = 1 << 20,
    ) -> Message:
        """Send one request and return the reply.

        Args:
            peer: Whom to ask; this peer itself is answered by its own handler.
            name: What is asked for.
            request: Plain values that msgpack encodes.
            timeout_seconds: Deadline for dialling, request and reply together.
            max_reply_bytes: A longer reply is a `ProtocolError`.

        Raises:
            PeerUnreachableError: It cannot be dialled.
            PeerRefusedError: It says no, and why.
            PeerLostError: It died, or went silent, before it replied.
            ProtocolError: Its reply is malformed or too long.
            DeadlineError: No reply in time.
        """
        if peer == self.peer_id:
            return await self._call_self(name, request, timeout_seconds)
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        async with self.open(peer, name, request, timeout_seconds) as channel:
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            try:
                return await channel.receive(left, min(max_reply_bytes, MAX_MESSAGE_BYTES))
            except DeadlineError:
                raise DeadlineError(f"peer {peer[-8:]} did not answer {name} within {timeout_seconds:g} s") from None

    async def _call_self(self, name: str, request: Message, timeout_seconds: float) -> Message:
        handler = self._local.get(name)
        if handler is None:
            raise PeerRefusedError(self.peer_id, f"{name!r} is not served by this peer")
        try:
            async with asyncio.timeout(timeout_seconds) as deadline:
                reply = await handler(self.peer_id, unpack(pack(request), self.peer_id))
                return unpack(pack(reply), self.peer_id)
        except P2PTrainError as error:
            raise PeerRefusedError(self.peer_id, _reason(error)) from error
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                raise DeadlineError(f"this peer did not answer {name} within {timeout_seconds:g} s") from None
            logger.exception("a handler failed, called by this peer itself")
            raise PeerRefusedError(self.peer_id, "internal error") from error

    def open(
        self, peer: PeerId, name: str, request: Message, timeout_seconds: float
    ) -> AbstractAsyncContextManager[Channel]:
        """Open a channel to ``peer`` for ``name``; it is closed at the end of the block, or aborted by an exception.

        Whether the peer accepts shows at the first receive, or when it refuses while something is sent.

        Args:
            peer: Another peer.
            name: What the channel is for.
            request: The first message, part of the header.
            timeout_seconds: Deadline for dialling and sending the request.

        Raises:
            ValueError: ``peer`` is this peer itself.
            PeerUnreachableError, PeerLostError: It cannot be dialled, or the stream ended at once.
            DeadlineError: The request could not be sent in time.
        """
        if peer == self.peer_id:
            raise ValueError("a channel leads to another peer")
        return self._open(peer, name, request, timeout_seconds)

    @asynccontextmanager
    async def _open(self, peer: PeerId, name: str, request: Message, timeout_seconds: float) -> AsyncIterator[Channel]:
        header = pack({"protocol": self._protocol, "swarm": self._swarm, "name": name})
        opening = frame(Kind.MESSAGE, header) + frame(Kind.MESSAGE, pack(request))
        channel = await self._dial(peer, opening, timeout_seconds)
        try:
            yield channel
            await channel.close()
        finally:
            await channel.abort_and_wait()

    async def _dial(self, peer: PeerId, opening: bytes, timeout_seconds: float) -> Channel:
        stream: Stream | None = None
        try:
            async with asyncio.timeout(timeout_seconds):
                stream = await self._transport.open(peer, PROTOCOL, timeout_seconds)
                await stream.write(opening)
        except TimeoutError:
            if stream is None:
                raise PeerUnreachableError(peer, f"not reached within {timeout_seconds:g} s") from None
            stream.abort()
            raise DeadlineError(f"peer {peer[-8:]} took no request within {timeout_seconds:g} s") from None
        except BaseException:
            if stream is not None:
                stream.abort()
            raise
        self._traffic.sent += len(opening)
        return Channel(stream, self._limits.channel, self._traffic)


def _reason(error: P2PTrainError) -> str:
    return error.reason if isinstance(error, PeerError) else str(error)


@asynccontextmanager
async def _until(lost: asyncio.Future[None]) -> AsyncIterator[None]:
    """Cancel the block when ``lost`` is done before it; `TimeoutError` is raised then."""
    running = True
    scope = asyncio.timeout(None)

    def stop(_: asyncio.Future[None]) -> None:
        if running and not scope.expired():
            scope.reschedule(asyncio.get_running_loop().time())

    async with scope:
        lost.add_done_callback(stop)
        try:
            yield
        finally:
            running = False
            lost.remove_done_callback(stop)
