"""Calls between peers: requests, replies and channels on any `Transport`.

Each stream opens with two frames: the header ``{protocol, swarm, name, credential}``, then the request. The server
checks the small header before it reads the request, and refuses another version, another swarm, an unknown name or a
peer that is not admitted. So admission costs no message and no round trip::

    caller                               server
      | {protocol, swarm, name, …}, request|
      | ---------------------------------> |  refused: ERROR reason
      |          reply, END                |
      | <--------------------------------- |  (or a conversation, see `Channel`)
      |             ACK                    |
      | ---------------------------------> |

`Rpc` is the interface for the rest of the package. The cost of remote peers is bounded: streams per peer and in total,
and time and bytes until the request is complete. After that the handler's own deadlines hold.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from p2ptrain.buffers import Bounded
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
from p2ptrain.network.admission import MAX_CREDENTIAL_BYTES, NOT_ADMITTED, OPEN_PROTOCOLS, Gate, OpenGate
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.frames import (
    FRAME,
    MAX_FRAME_BYTES,
    MAX_MESSAGE_BYTES,
    Kind,
    Traffic,
    error_frame,
    frame,
    pack,
    unpack,
)
from p2ptrain.network.rpc.receive import PIECE_BYTES, too_long
from p2ptrain.network.schema import Message
from p2ptrain.network.transport import PeerId, Stream, Transport
from p2ptrain.runtime import Runtime

logger = logging.getLogger(__name__)

PROTOCOL = "/p2ptrain/rpc"
MAX_HEADER_BYTES = 1024
MAX_INBOUND_STREAMS = 1024
"""Streams served at once, in total."""
MAX_INBOUND_STREAMS_PER_PEER = 192
HEADER_SECONDS = 10.0
"""Timeout for a new stream to deliver its header and request."""
REFUSAL_SECONDS = 2.0
"""Timeout for a refused peer to read the reason."""
MAX_COUNTED_REFUSALS = 4096
MAX_CONCURRENT_REFUSALS = 64
ANSWER_SECONDS = 0.1
"""Time after which a peer that still works on a request sends a PING: callers measure the round trip by it."""
MAX_DIALS_REMEMBERED = 1024
"""Bound on the peers with a recorded dial; the oldest record is dropped."""

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
    """The first frame of every stream: the caller's protocol version, manifest digest and credential, and the name.

    Every field has a default, so a caller of another version is refused as such even if it omits some.
    """

    protocol: Annotated[int, Meta(ge=-1, le=1 << 31)] = -1
    swarm: Annotated[bytes, Meta(max_length=64)] = b""
    name: Annotated[str, Meta(max_length=128)] = ""
    credential: Annotated[bytes, Meta(max_length=MAX_CREDENTIAL_BYTES)] = b""


@dataclass(frozen=True)
class _Service:
    """A served name; ``answer`` is None if it takes channels instead of calls."""

    request: type
    handler: ChannelHandler[Any]
    max_request_bytes: int
    answer: RequestHandler[Any] | None = None


class _RefusalError(Exception):
    """Refusal of an incoming stream: ``cause`` is counted, ``reason`` and ``is_busy`` are sent to the peer."""

    def __init__(self, cause: str, reason: str, *, is_busy: bool = False) -> None:
        super().__init__(reason)
        self.cause = cause
        self.reason = reason
        self.is_busy = is_busy


class Rpc:
    """RPC endpoint of one peer: calls other peers by name and answers their calls.

    The caller closes ``transport``. ``swarm`` is the manifest digest (32 bytes); peers of other swarms are refused.

    Attributes:
        traffic: Bytes of all channels, and their limits.
        inbound: The number of streams that this peer serves now, by caller.
        refusals: Refusals by (peer, cause). The number of peers is bounded; the rest count under ``"others"``.
        dial_seconds: The round trip to each peer that has answered: the time of the last dial, or from there to its
            first answer if that took longer, doubled for each failed dial since. A daemon opens streams on its
            connections without a round trip.
        unreached_at: Loop time of the last dial of each peer that found it unreachable, and no answer since.
        gate: Decides who is served.
        credential: Admits this peer with others; empty if it needs none.
    """

    def __init__(
        self,
        transport: Transport,
        runtime: Runtime,
        swarm: bytes,
        up_bytes_per_second: float = 0.0,
        down_bytes_per_second: float = 0.0,
    ) -> None:
        self.runtime = runtime
        self.swarm = swarm
        self.peer_id = transport.peer_id
        self.traffic = Traffic(up_bytes_per_second, down_bytes_per_second)
        self.refusals: Counter[tuple[PeerId, str]] = Counter()
        self.dial_seconds = Bounded[PeerId, float](MAX_DIALS_REMEMBERED)
        self.unreached_at = Bounded[PeerId, float](MAX_DIALS_REMEMBERED)
        self.gate: Gate = OpenGate()
        self.credential = b""
        self._root = self
        self._scope = ""
        self._transport = transport
        self._services: dict[str, _Service] = {}
        self._outbound: Counter[PeerId] = Counter()
        self.inbound: Counter[PeerId] = Counter()
        self._inbound_tasks: dict[asyncio.Task[None], None] = {}
        self._refusing = 0
        self._closed = False

    def scoped(self, scope: str) -> Rpc:
        """Return a view that prefixes every name with ``scope``; only the original may be started, moved or closed."""
        view = copy.copy(self)
        view._scope = f"{self._scope}{scope}/"
        return view

    def is_talking_with(self, peer: PeerId) -> bool:
        """True if a stream with ``peer`` is open now, in either direction."""
        return self._outbound[peer] > 0 or self.inbound[peer] > 0

    async def start(self) -> None:
        """Start to accept streams; call it after the first `serve`."""
        await self._transport.serve(PROTOCOL, self._on_stream)

    async def move(self, transport: Transport) -> None:
        """Switch to another transport of the same peer. The old one must be closed, so all its streams have ended."""
        self._transport = transport
        await self.start()

    async def close(self) -> None:
        """Refuse new streams, cancel the running handlers, and wait for them; idempotent."""
        self._closed = True
        tasks = [task for task in self._inbound_tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # Calling

    async def call(
        self,
        peer: PeerId,
        name: str,
        request: object,
        reply: type[T],
        timeout_seconds: float,
        *,
        max_reply_bytes: int = 1 << 20,
    ) -> T:
        """Send one request and return the reply. A call to this peer itself goes straight to its own handler.

        ``timeout_seconds`` is the deadline for dial, request and reply together.

        Raises:
            PeerError: The dial failed, the peer refused or was lost, or the reply does not fit the schema or is too
                long; a subclass of `PeerError` for each.
            DeadlineError: No reply in time.
        """
        max_reply_bytes = min(max_reply_bytes, MAX_MESSAGE_BYTES)
        if peer == self.peer_id:
            return await self._call_self(self._scope + name, request, reply, timeout_seconds, max_reply_bytes)
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        async with self.open(peer, name, request, timeout_seconds) as channel:
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            try:
                return await channel.receive(reply, left, max_reply_bytes)
            except DeadlineError:
                raise DeadlineError(f"peer {peer[-8:]} did not answer {name} within {timeout_seconds:g} s") from None

    async def _call_self(
        self, name: str, request: object, reply: type[T], timeout_seconds: float, max_reply_bytes: int
    ) -> T:
        """Answer a call of this peer by itself, on copies of request and reply, within the limits of other peers."""
        data, service = pack(request), self._services.get(name)
        if service is None or service.answer is None:
            raise PeerRefusedError(self.peer_id, f"{name!r} {NOT_SERVED}")
        if len(data) > service.max_request_bytes:
            raise PeerRefusedError(self.peer_id, too_long(self.peer_id, len(data), service.max_request_bytes).reason)
        try:
            async with asyncio.timeout(timeout_seconds) as deadline:
                data = pack(await service.answer(self.peer_id, unpack(data, self.peer_id, service.request)))
        except P2PTrainError as error:
            raise PeerRefusedError(self.peer_id, _reason(error)) from error
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                raise DeadlineError(f"this peer did not answer {name} within {timeout_seconds:g} s") from None
            logger.exception("a handler failed, called by this peer itself")
            raise PeerRefusedError(self.peer_id, "internal error") from error
        if len(data) > max_reply_bytes:
            raise too_long(self.peer_id, len(data), max_reply_bytes)
        return unpack(data, self.peer_id, reply)

    @asynccontextmanager
    async def open(
        self, peer: PeerId, name: str, request: object, timeout_seconds: float, *, expected_bytes: int = 0
    ) -> AsyncIterator[Channel]:
        """Open a channel to another peer for ``name``; the end of the block closes it, an exception aborts it.

        ``request`` is the first message. ``timeout_seconds`` bounds dialling and sending it. A refusal appears at the
        first receive, or during a send. ``expected_bytes`` estimates the traffic in both directions; see
        `Transport.open`.

        Raises:
            PeerUnreachableError, PeerLostError: The dial failed, or the stream ended at once.
            DeadlineError: The request could not be sent in time.
        """
        if peer == self.peer_id:
            raise ValueError("a channel leads to another peer")
        header = pack(Header(PROTOCOL_VERSION, self.swarm, self._scope + name, self._root.credential))
        opening = frame(Kind.MESSAGE, header) + frame(Kind.MESSAGE, pack(request))
        self._outbound[peer] += 1
        try:
            channel = await self._dial(peer, opening, timeout_seconds, expected_bytes)
            try:
                yield channel
                await channel.close()
            finally:
                await channel.abort_and_wait()
        finally:
            self._outbound -= Counter([peer])

    async def _dial(self, peer: PeerId, opening: bytes, timeout_seconds: float, expected_bytes: int) -> Channel:
        stream: Stream | None = None
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(timeout_seconds):
                transport = self._root._transport
                stream = await transport.open(peer, PROTOCOL, timeout_seconds, expected_bytes=expected_bytes)
                await stream.write(opening)
        except TimeoutError:
            self._note_dial(peer, None)
            if stream is None:
                self.unreached_at[peer] = loop.time()
                raise PeerUnreachableError(peer, f"not reached within {timeout_seconds:g} s") from None
            stream.abort()
            raise DeadlineError(f"peer {peer[-8:]} took no request within {timeout_seconds:g} s") from None
        except BaseException as error:
            self._note_dial(peer, None)
            if isinstance(error, PeerUnreachableError):
                self.unreached_at[peer] = loop.time()
            if stream is not None:
                stream.abort()
            raise
        self.traffic.sent += len(opening)
        dialled = loop.time()

        def note_answer() -> None:
            self._note_dial(peer, max(dialled - began, loop.time() - dialled))
            self.unreached_at.pop(peer, None)

        return Channel(stream, self.traffic, note_answer)

    def _note_dial(self, peer: PeerId, seconds: float | None) -> None:
        before = self.dial_seconds.get(peer)
        if seconds is None and before is not None:
            seconds = 2.0 * before
        if seconds is not None:
            self.dial_seconds[peer] = seconds

    # Answering

    def serve(self, name: str, request: type[T], handler: RequestHandler[T], *, max_request_bytes: int = 65536) -> None:
        """Answer calls of ``name`` with the result of ``handler(peer, request)``, which may have any schema.

        Requests must fit the schema ``request`` (`p2ptrain.network.schema`) and the size limit. A `P2PTrainError` from
        the handler refuses the call with its message. Losing the caller cancels the handler.
        """

        async def answer(channel: Channel, asked: T) -> None:
            async with _until(channel.lost):
                reply = await handler(channel.remote, asked)
            await channel.close(reply)

        self._services[self._scope + name] = _Service(request, answer, max_request_bytes, handler)

    def serve_channel(
        self, name: str, request: type[T], handler: ChannelHandler[T], *, max_request_bytes: int = 65536
    ) -> None:
        """Run ``handler(channel, request)`` for each channel opened for ``name``; the channel closes when it returns.

        A `P2PTrainError` from the handler refuses the channel with its message. Other arguments as for `serve`.
        """
        self._services[self._scope + name] = _Service(request, handler, max_request_bytes)

    def withdraw(self, name: str) -> None:
        """Stop serving ``name`` and every name in a scope ``name``; running handlers continue."""
        gone = self._scope + name
        for known in [known for known in self._services if known == gone or known.startswith(f"{gone}/")]:
            del self._services[known]

    def count_refusal(self, peer: PeerId, cause: str) -> None:
        """Count one refusal of ``peer``. ``cause`` is a short fixed text, never text from the peer."""
        key = (peer, cause)
        if key not in self.refusals and len(self.refusals) >= MAX_COUNTED_REFUSALS:
            key = ("others", cause)
        self.refusals[key] += 1

    async def _on_stream(self, stream: Stream) -> None:
        """Serve or refuse one stream until it ends."""
        peer = stream.remote
        try:
            self._admit(peer)
        except _RefusalError as refusal:
            await self._refuse_stream(stream, refusal)
            return
        task = asyncio.current_task()
        assert task is not None
        self.inbound[peer] += 1
        self._inbound_tasks[task] = None
        try:
            service, request = await self._read_header(stream)
            channel = Channel(stream, self.traffic)
            channel.heartbeat.beat_within(ANSWER_SECONDS)
            await self._converse(service, request, channel)
        except _RefusalError as refusal:
            await self._refuse_stream(stream, refusal)
        except PeerLostError:
            stream.abort()
        finally:
            del self._inbound_tasks[task]
            self.inbound -= Counter([peer])

    def _admit(self, peer: PeerId) -> None:
        if self._closed:
            raise _RefusalError("closing", "this peer is leaving")
        if self.inbound[peer] >= MAX_INBOUND_STREAMS_PER_PEER:
            reason = "too many streams from this peer: close some first"
            raise _RefusalError("too many streams", reason, is_busy=True)
        if len(self._inbound_tasks) >= MAX_INBOUND_STREAMS:
            raise _RefusalError("busy", "too many streams: try again later", is_busy=True)

    async def _read_header(self, stream: Stream) -> tuple[_Service, Any]:
        peer = stream.remote
        try:
            async with asyncio.timeout(HEADER_SECONDS):
                service = self._find(peer, unpack(await self._read_message(stream, MAX_HEADER_BYTES), peer, Header))
                data = await self._read_message(stream, service.max_request_bytes)
                return service, unpack(data, peer, service.request)
        except TimeoutError:
            raise _RefusalError("slow header", "the header took too long") from None
        except ProtocolError as error:
            raise _RefusalError("malformed header", f"malformed header: {error.reason}") from error

    def _find(self, peer: PeerId, header: Header) -> _Service:
        if header.protocol != PROTOCOL_VERSION:
            reason = f"{OTHER_PROTOCOL}{header.protocol}, this peer speaks {PROTOCOL_VERSION}"
            raise _RefusalError("other protocol", reason)
        if header.swarm != self.swarm:
            raise _RefusalError("other swarm", f"{OTHER_SWARM}: this peer has another manifest")
        if header.name not in self._services:
            raise _RefusalError("unknown name", f"{header.name[:64]!r} {NOT_SERVED}")
        is_for_all = header.name.rpartition("/")[2] in OPEN_PROTOCOLS
        if not is_for_all and (reason := self.gate.admitted(peer, header.credential, contributes=False)):
            raise _RefusalError(NOT_ADMITTED, f"{NOT_ADMITTED}: {reason}")
        return self._services[header.name]

    async def _read_message(self, stream: Stream, max_bytes: int) -> bytes:
        length, kind = FRAME.unpack(await stream.read(FRAME.size))
        if kind != Kind.MESSAGE:
            raise _RefusalError("malformed header", f"malformed header: a frame of kind {kind}")
        if length > max_bytes:
            raise _RefusalError("oversized request", f"a frame of {length} bytes where {max_bytes} are allowed")
        self.traffic.received += FRAME.size + length
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
            async with asyncio.timeout(REFUSAL_SECONDS):
                data = error_frame(refusal.reason, is_busy=refusal.is_busy)
                await stream.write(data)
                self.traffic.sent += len(data)
                # Closing while the peer still writes could lose the reason: read until the peer ends the stream.
                for _ in range(MAX_FRAME_BYTES // PIECE_BYTES):
                    await stream.read(PIECE_BYTES)
        except (TimeoutError, PeerLostError):
            pass
        finally:
            self._refusing -= 1
            stream.abort()

    async def _converse(self, service: _Service, request: object, channel: Channel) -> None:
        """Run the handler of one channel; its error refuses the channel."""
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
