"""The answering half of `p2ptrain.network.rpc.client`: admits, checks and dispatches incoming streams.

`RpcServer.on_stream` admits a stream, reads its header and request, and runs the handler of the requested name. It
refuses any other stream with a reason, and counts refusals by peer and cause.

The cost of remote peers is bounded: streams per peer and in total, and time and bytes until the request is complete.
After that the handler's own deadlines hold.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from p2ptrain.errors import DeadlineError, P2PTrainError, PeerError, PeerLostError, PeerRefusedError, ProtocolError
from p2ptrain.network.rpc.channel import Channel, ChannelLimits
from p2ptrain.network.rpc.frame_reader import PIECE_BYTES
from p2ptrain.network.rpc.frames import FRAME, MAX_FRAME_BYTES, Kind, error_frame, pack, unpack
from p2ptrain.network.rpc.rates import Traffic
from p2ptrain.network.schema import Message
from p2ptrain.network.transport import PeerId, Stream

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 512
MAX_COUNTED_REFUSALS = 4096
MAX_CONCURRENT_REFUSALS = 64

OTHER_PROTOCOL = "protocol "
"""Start of the refusal of another protocol version; the version follows."""
OTHER_SWARM = "another swarm"
"""Start of the refusal of a peer with another manifest."""
NOT_SERVED = "is not served by this peer"
"""End of the refusal of an unknown name."""

T = TypeVar("T")
RequestHandler = Callable[[PeerId, T], Awaitable[object]]
ChannelHandler = Callable[[Channel, T], Awaitable[None]]


class Header(Message, frozen=True):
    """The first frame of every stream: protocol version and manifest digest of the caller, and the requested name.

    Every field has a default, so a caller of another version is refused as such even if it omits some.
    """

    protocol: Annotated[int, Meta(ge=-1, le=1 << 31)] = -1
    swarm: Annotated[bytes, Meta(max_length=64)] = b""
    name: Annotated[str, Meta(max_length=128)] = ""


@dataclass(frozen=True)
class RpcLimits:
    """Bounds on the resources that other peers may use."""

    inbound_streams: int = 1024
    """Streams served at once, in total."""
    inbound_streams_per_peer: int = 64
    """Streams served at once for one peer."""
    header_seconds: float = 10.0
    """Timeout for a new stream to deliver its header and request."""
    up_bytes_per_second: int = 0
    """Upload limit of all channels together, heartbeats exempt; 0 sets no limit."""
    down_bytes_per_second: int = 0
    """Download limit of all channels together, by backpressure; 0 sets no limit."""
    channel: ChannelLimits = field(default_factory=ChannelLimits)


@dataclass(frozen=True)
class _Service:
    request: type
    handler: ChannelHandler[Any]
    max_request_bytes: int


class _RefusalError(Exception):
    """Refusal of an incoming stream: ``cause`` is counted, ``reason`` is sent to the peer."""

    def __init__(self, cause: str, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause
        self.reason = reason


class RpcServer:
    """Registry of handlers by name, and of the streams being served; `Rpc` documents the shared methods."""

    def __init__(self, swarm: bytes, protocol: int, limits: RpcLimits, traffic: Traffic) -> None:
        self.refusals: Counter[tuple[PeerId, str]] = Counter()
        self._swarm = swarm
        self._protocol = protocol
        self._limits = limits
        self._traffic = traffic
        self._services: dict[str, _Service] = {}
        self._local: dict[str, tuple[type, RequestHandler[Any]]] = {}
        self._inbound: Counter[PeerId] = Counter()
        self._inbound_tasks: dict[asyncio.Task[None], None] = {}
        self._refusing = 0
        self._closed = False

    @property
    def num_inbound(self) -> int:
        return self._inbound.total()

    def is_serving(self, peer: PeerId) -> bool:
        return self._inbound[peer] > 0

    async def close(self) -> None:
        self._closed = True
        tasks = [task for task in self._inbound_tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def serve(self, name: str, request: type[T], handler: RequestHandler[T], max_request_bytes: int) -> None:
        async def answer(channel: Channel, asked: T) -> None:
            async with _until(channel.lost):
                reply = await handler(channel.remote, asked)
            await channel.close(reply)

        self._local[name] = (request, handler)
        self._services[name] = _Service(request, answer, max_request_bytes)

    def serve_channel(self, name: str, request: type[T], handler: ChannelHandler[T], max_request_bytes: int) -> None:
        self._services[name] = _Service(request, handler, max_request_bytes)

    def withdraw(self, name: str) -> None:
        gone = [known for known in self._services if known == name or known.startswith(f"{name}/")]
        for known in gone:
            del self._services[known]
            self._local.pop(known, None)

    def count_refusal(self, peer: PeerId, cause: str) -> None:
        key = (peer, cause)
        if key not in self.refusals and len(self.refusals) >= MAX_COUNTED_REFUSALS:
            key = ("others", cause)
        self.refusals[key] += 1

    async def answer_self(
        self, own_id: PeerId, name: str, request: object, reply: type[T], timeout_seconds: float
    ) -> T:
        """Answer a call of this peer by itself, on copies of request and reply; raises as `Rpc.call` does."""
        if name not in self._local:
            raise PeerRefusedError(own_id, f"{name!r} {NOT_SERVED}")
        schema, handler = self._local[name]
        try:
            async with asyncio.timeout(timeout_seconds) as deadline:
                answer = await handler(own_id, unpack(pack(request), own_id, schema))
                return unpack(pack(answer), own_id, reply)
        except P2PTrainError as error:
            raise PeerRefusedError(own_id, _reason(error)) from error
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                raise DeadlineError(f"this peer did not answer {name} within {timeout_seconds:g} s") from None
            logger.exception("a handler failed, called by this peer itself")
            raise PeerRefusedError(own_id, "internal error") from error

    async def on_stream(self, stream: Stream) -> None:
        """Serve or refuse one stream until it ends; the handler for `Transport.serve`."""
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

    async def _read_header(self, stream: Stream) -> tuple[_Service, Any]:
        peer = stream.remote
        try:
            async with asyncio.timeout(self._limits.header_seconds):
                service = self._find(unpack(await self._read_message(stream, MAX_HEADER_BYTES), peer, Header))
                data = await self._read_message(stream, service.max_request_bytes)
                return service, unpack(data, peer, service.request)
        except TimeoutError:
            raise _RefusalError("slow header", "the header took too long") from None
        except ProtocolError as error:
            raise _RefusalError("malformed header", f"malformed header: {error.reason}") from error

    def _find(self, header: Header) -> _Service:
        if header.protocol != self._protocol:
            reason = f"{OTHER_PROTOCOL}{header.protocol}, this peer speaks {self._protocol}"
            raise _RefusalError("other protocol", reason)
        if header.swarm != self._swarm:
            raise _RefusalError("other swarm", f"{OTHER_SWARM}: this peer has another manifest")
        if header.name not in self._services:
            raise _RefusalError("unknown name", f"{header.name[:64]!r} {NOT_SERVED}")
        return self._services[header.name]

    async def _read_message(self, stream: Stream, max_bytes: int) -> bytes:
        length, kind = FRAME.unpack(await stream.read(FRAME.size))
        if kind != Kind.MESSAGE:
            raise _RefusalError("malformed header", f"malformed header: a frame of kind {kind}")
        if length > max_bytes:
            raise _RefusalError("oversized request", f"a frame of {length} bytes where {max_bytes} are allowed")
        self._traffic.received += FRAME.size + length
        return await stream.read(length) if length else b""

    async def _refuse_stream(self, stream: Stream, refusal: _RefusalError) -> None:
        """Count the refusal, send the reason unless many refusals run already, and end the stream."""
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
                # Closing while the peer still writes could lose the reason: read until the peer ends the stream.
                for _ in range(MAX_FRAME_BYTES // PIECE_BYTES):
                    await stream.read(PIECE_BYTES)
        except (TimeoutError, PeerLostError):
            pass
        finally:
            self._refusing -= 1
            stream.abort()

    async def _serve(self, service: _Service, request: object, channel: Channel) -> None:
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
                return  # `_until` cancelled the handler because the caller is lost.
            logger.exception("a handler failed, peer %s", peer[-8:])
            self.count_refusal(peer, "internal error")
            await channel.refuse("internal error")
        finally:
            await channel.abort_and_wait()


def _reason(error: P2PTrainError) -> str:
    return error.reason if isinstance(error, PeerError) else str(error)


@asynccontextmanager
async def _until(lost: asyncio.Future[None]) -> AsyncIterator[None]:
    """Cancel the block with `TimeoutError` when ``lost`` completes."""
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
