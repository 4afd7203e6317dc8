"""Calls between peers: requests, replies and channels on any `Transport`.

Each stream opens with two frames: the header ``{protocol, swarm, name}``, then the request. The server checks the
small header before it reads the request, and refuses another version, another swarm or an unknown name::

    caller                               server
      | {protocol, swarm, name}, request   |
      | ---------------------------------> |  refused: ERROR reason
      |          reply, END                |
      | <--------------------------------- |  (or a conversation, see `Channel`)
      |             ACK                    |
      | ---------------------------------> |

`Rpc` is the interface for the rest of the package. `p2ptrain.network.rpc.server` answers.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeVar

from p2ptrain.errors import DeadlineError, PeerUnreachableError
from p2ptrain.manifest import PROTOCOL_VERSION
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.frames import MAX_MESSAGE_BYTES, Kind, frame, pack
from p2ptrain.network.rpc.rates import RateLimit, Traffic
from p2ptrain.network.rpc.server import (
    NOT_SERVED,
    OTHER_PROTOCOL,
    OTHER_SWARM,
    ChannelHandler,
    Header,
    RequestHandler,
    RpcLimits,
    RpcServer,
)
from p2ptrain.network.transport import PeerId, Stream, Transport
from p2ptrain.runtime import Runtime

__all__ = ["NOT_SERVED", "OTHER_PROTOCOL", "OTHER_SWARM", "PROTOCOL", "Rpc", "RpcLimits"]

T = TypeVar("T")

PROTOCOL = "/p2ptrain/rpc"
MAX_DIALS_REMEMBERED = 1024
"""Bound on the peers with a recorded dial time; the oldest record is dropped."""


class Rpc:
    """RPC endpoint of one peer: calls other peers by name and answers their calls.

    The caller closes ``transport``. ``swarm`` is the manifest digest (32 bytes); peers of other swarms are refused.
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
        self._root = self
        self._scope = ""
        self._transport = transport
        self._swarm = swarm
        self._limits = limits = limits or RpcLimits()
        self._protocol = protocol
        self._traffic = Traffic(RateLimit(limits.up_bytes_per_second), RateLimit(limits.down_bytes_per_second))
        self._server = RpcServer(swarm, protocol, limits, self._traffic)
        self._outbound: Counter[PeerId] = Counter()
        self._dial_seconds: dict[PeerId, float] = {}

    def scoped(self, scope: str) -> Rpc:
        """Return a view that prefixes every name with ``scope``; only the original may be started, moved or closed."""
        view = copy.copy(self)
        view._scope = f"{self._scope}{scope}/"
        return view

    @property
    def peer_id(self) -> PeerId:
        return self._root._transport.peer_id

    @property
    def swarm(self) -> bytes:
        return self._swarm

    @property
    def bytes_sent(self) -> int:
        return self._traffic.sent

    @property
    def bytes_received(self) -> int:
        return self._traffic.received

    @property
    def refusals(self) -> Counter[tuple[PeerId, str]]:
        """Refusals by (peer, cause). The number of peers is bounded; the rest count under ``"others"``."""
        return self._server.refusals

    @property
    def num_inbound(self) -> int:
        return self._server.num_inbound

    def is_talking_with(self, peer: PeerId) -> bool:
        """True if a stream with ``peer`` is open now, in either direction."""
        return self._outbound[peer] > 0 or self._server.is_serving(peer)

    def dial_seconds(self, peer: PeerId) -> float | None:
        """Return the time of the last dial of ``peer``, doubled for each failure since; None if unknown."""
        return self._dial_seconds.get(peer)

    def _note_dial(self, peer: PeerId, seconds: float | None) -> None:
        before = self._dial_seconds.pop(peer, None)
        if seconds is None:
            seconds = None if before is None else 2.0 * before
        if seconds is not None:
            self._dial_seconds[peer] = seconds
            if len(self._dial_seconds) > MAX_DIALS_REMEMBERED:
                del self._dial_seconds[next(iter(self._dial_seconds))]

    async def start(self) -> None:
        """Start to accept streams; call it after the first `serve`."""
        await self._transport.serve(PROTOCOL, self._server.on_stream)

    async def move(self, transport: Transport) -> None:
        """Switch to another transport of the same peer. The old one must be closed, so all its streams have ended."""
        self._transport = transport
        await self.start()

    async def close(self) -> None:
        """Refuse new streams, cancel the running handlers, and wait for them; idempotent."""
        await self._server.close()

    # Answering

    def serve(self, name: str, request: type[T], handler: RequestHandler[T], *, max_request_bytes: int = 65536) -> None:
        """Answer calls of ``name`` with the result of ``handler(peer, request)``, which may have any schema.

        Requests must fit the schema ``request`` (`p2ptrain.network.schema`) and the size limit. A `P2PTrainError` from
        the handler refuses the call with its message. Losing the caller cancels the handler.
        """
        self._server.serve(self._scope + name, request, handler, max_request_bytes)

    def serve_channel(
        self, name: str, request: type[T], handler: ChannelHandler[T], *, max_request_bytes: int = 65536
    ) -> None:
        """Run ``handler(channel, request)`` for each channel opened for ``name``; the channel closes when it returns.

        A `P2PTrainError` from the handler refuses the channel with its message. Other arguments as for `serve`.
        """
        self._server.serve_channel(self._scope + name, request, handler, max_request_bytes)

    def withdraw(self, name: str) -> None:
        """Stop serving ``name`` and every name in a scope ``name``; running handlers continue."""
        self._server.withdraw(self._scope + name)

    def count_refusal(self, peer: PeerId, cause: str) -> None:
        """Count one refusal of ``peer``. ``cause`` is a short fixed text, never text from the peer."""
        self._server.count_refusal(peer, cause)

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

        Args:
            request: An instance of the schema that ``name`` is served for.
            timeout_seconds: Deadline for dial, request and reply together.

        Raises:
            PeerUnreachableError: The dial failed.
            PeerRefusedError: The peer refused, with a reason.
            PeerLostError: The peer was lost before it replied.
            ProtocolError: The reply does not fit the schema or is too long.
            DeadlineError: No reply in time.
        """
        if peer == self.peer_id:
            return await self._server.answer_self(peer, self._scope + name, request, reply, timeout_seconds)
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        async with self.open(peer, name, request, timeout_seconds) as channel:
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            try:
                return await channel.receive(reply, left, min(max_reply_bytes, MAX_MESSAGE_BYTES))
            except DeadlineError:
                raise DeadlineError(f"peer {peer[-8:]} did not answer {name} within {timeout_seconds:g} s") from None

    def open(
        self, peer: PeerId, name: str, request: object, timeout_seconds: float, *, expected_bytes: int = 0
    ) -> AbstractAsyncContextManager[Channel]:
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
        return self._open(peer, name, request, timeout_seconds, expected_bytes)

    @asynccontextmanager
    async def _open(
        self, peer: PeerId, name: str, request: object, timeout_seconds: float, expected_bytes: int
    ) -> AsyncIterator[Channel]:
        header = pack(Header(self._protocol, self._swarm, self._scope + name))
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
            self._outbound[peer] -= 1
            if not self._outbound[peer]:
                del self._outbound[peer]

    async def _dial(self, peer: PeerId, opening: bytes, timeout_seconds: float, expected_bytes: int) -> Channel:
        stream: Stream | None = None
        loop = asyncio.get_running_loop()
        began, seconds = loop.time(), None
        try:
            async with asyncio.timeout(timeout_seconds):
                transport = self._root._transport
                stream = await transport.open(peer, PROTOCOL, timeout_seconds, expected_bytes=expected_bytes)
                await stream.write(opening)
            seconds = loop.time() - began
        except TimeoutError:
            if stream is None:
                raise PeerUnreachableError(peer, f"not reached within {timeout_seconds:g} s") from None
            stream.abort()
            raise DeadlineError(f"peer {peer[-8:]} took no request within {timeout_seconds:g} s") from None
        except BaseException:
            if stream is not None:
                stream.abort()
            raise
        finally:
            self._note_dial(peer, seconds)
        self._traffic.sent += len(opening)
        return Channel(stream, self._limits.channel, self._traffic)
