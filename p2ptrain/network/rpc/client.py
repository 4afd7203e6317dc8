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

`Rpc` is what the rest of the package uses. The calling half is here; the answering half, with what bounds the cost of
strangers, is `p2ptrain.network.rpc.server`.
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
"""Peers of which it is known how long a dial takes; the latest ones."""


class Rpc:
    """Calls other peers by name, and answers them.

    Attributes:
        runtime: This peer's time and chance.

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
        """The same peer, calling and answering names of a scope: for parts of which a peer has several.

        Start, move and close the `Rpc` that it was made of.
        """
        view = copy.copy(self)
        view._scope = f"{self._scope}{scope}/"
        return view

    @property
    def peer_id(self) -> PeerId:
        """This peer's own id."""
        return self._root._transport.peer_id

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
    def refusals(self) -> Counter[tuple[PeerId, str]]:
        """How often each peer was refused, by cause; a bounded number of peers, the rest under ``"others"``."""
        return self._server.refusals

    @property
    def num_inbound(self) -> int:
        """Streams that are being served now."""
        return self._server.num_inbound

    def is_talking_with(self, peer: PeerId) -> bool:
        """Whether a stream with a peer is open now, in either direction."""
        return self._outbound[peer] > 0 or self._server.is_serving(peer)

    def dial_seconds(self, peer: PeerId) -> float | None:
        """Return how long the last dial of a peer took, doubled for each failure since; None if unknown."""
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
        """Begin to answer; call it after the first names are served."""
        await self._transport.serve(PROTOCOL, self._server.on_stream)

    async def move(self, transport: Transport) -> None:
        """Go on with another transport of the same peer; the old one is closed, and with it all streams have ended."""
        self._transport = transport
        await self.start()

    async def close(self) -> None:
        """Refuse new streams, cancel the handlers that run, and wait until they are gone; idempotent."""
        await self._server.close()

    # Answering

    def serve(self, name: str, request: type[T], handler: RequestHandler[T], *, max_request_bytes: int = 65536) -> None:
        """Answer calls of ``name`` with what ``handler(peer, request)`` returns.

        A handler that raises a `P2PTrainError` refuses with its message. It is cancelled when the caller is gone.

        Args:
            name: What callers ask for.
            request: The schema of requests (`p2ptrain.network.schema`); others are refused.
            handler: Returns the reply, of any schema.
            max_request_bytes: A longer request is refused.
        """
        self._server.serve(self._scope + name, request, handler, max_request_bytes)

    def serve_channel(
        self, name: str, request: type[T], handler: ChannelHandler[T], *, max_request_bytes: int = 65536
    ) -> None:
        """Run ``handler(channel, request)`` for each channel opened for ``name``; the channel closes when it returns.

        A handler that raises a `P2PTrainError` refuses with its message. Arguments as of `serve`.
        """
        self._server.serve_channel(self._scope + name, request, handler, max_request_bytes)

    def withdraw(self, name: str) -> None:
        """Answer for ``name``, and for all of a scope of that name, no more; what is being served goes on."""
        self._server.withdraw(self._scope + name)

    def count_refusal(self, peer: PeerId, cause: str) -> None:
        """Count that ``peer`` was refused for ``cause`` (a short fixed text, not what the peer sent)."""
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
        """Send one request and return the reply.

        Args:
            peer: Whom to ask; this peer itself is answered by its own handler.
            name: What is asked for.
            request: Of the schema that ``name`` is served for.
            reply: The schema of the reply.
            timeout_seconds: Deadline for dialling, request and reply together.
            max_reply_bytes: A longer reply is a `ProtocolError`.

        Raises:
            PeerUnreachableError: It cannot be dialled.
            PeerRefusedError: It says no, and why.
            PeerLostError: It died, or went silent, before it replied.
            ProtocolError: Its reply does not fit the schema or is too long.
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
        """Open a channel to ``peer`` for ``name``; it is closed at the end of the block, or aborted by an exception.

        Whether the peer accepts shows at the first receive, or when it refuses while something is sent.

        Args:
            peer: Another peer.
            name: What the channel is for.
            request: The first message, part of the header.
            timeout_seconds: Deadline for dialling and sending the request.
            expected_bytes: About how many bytes will go over it, both ways together; see `Transport.open`.

        Raises:
            ValueError: ``peer`` is this peer itself.
            PeerUnreachableError, PeerLostError: It cannot be dialled, or the stream ended at once.
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
