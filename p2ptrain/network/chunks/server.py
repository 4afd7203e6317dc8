"""Serves chunks to several receivers, within limits on transfers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from p2ptrain.errors import DeadlineError, PeerLostError, ProtocolError, TemporaryError
from p2ptrain.network.chunks.messages import MAX_ASKED, Ask, Enough, FromReceiver, Open, service
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.schema import Message
from p2ptrain.network.transport import PeerId


class Supply(Protocol):
    """The chunks of one transfer."""

    num_chunks: int

    async def describe(self) -> Message | None:
        """Return the message that precedes the chunks; None for no message."""

    async def read(self, index: int) -> bytes | bytearray | memoryview:
        """Return a chunk once it is available; the buffer is valid until the next call."""


@dataclass(frozen=True)
class Ration:
    """Limits on the transfers that a peer serves."""

    transfers: int = 8
    """Most parallel transfers; the server refuses more."""
    transfers_per_peer: int = 2
    idle_seconds: float = 120.0
    """Timeout for a receiver's next request, from its last progress."""


class ChunkServer:
    """Serves chunks under a name; ``find`` returns the requested supply, or raises a `P2PTrainError` to refuse.

    Attributes:
        active: The number of running transfers of each peer that has any.
    """

    def __init__(
        self, rpc: Rpc, name: str, find: Callable[[Open], Awaitable[Supply]], ration: Ration | None = None
    ) -> None:
        self._find = find
        self._ration = ration or Ration()
        self.active: Counter[PeerId] = Counter()
        rpc.serve_channel(service(name), Open, self._serve, max_request_bytes=1024)

    async def _serve(self, channel: Channel, request: Open) -> None:
        peer, ration = channel.remote, self._ration
        if self.active.total() >= ration.transfers or self.active[peer] >= ration.transfers_per_peer:
            raise TemporaryError("busy: too many downloads from this peer, ask again in a moment")
        self.active[peer] += 1
        try:
            await self._converse(channel, await self._find(request))
        finally:
            self.active -= Counter([peer])

    async def _converse(self, channel: Channel, supply: Supply) -> None:
        if (description := await supply.describe()) is not None:
            await channel.send(description)
        chunks_left = 4 * supply.num_chunks + MAX_ASKED  # upper bound for an honest receiver
        while True:
            match await self._next_request(channel):
                case Ask(chunks):
                    chunks_left -= len(chunks)
                    if chunks_left < 0 or max(chunks) >= supply.num_chunks:
                        raise ProtocolError(channel.remote, "asked for chunks that there are not, or too often")
                    for index in chunks:
                        await channel.send_bytes(await supply.read(index))
                case Enough() | None:
                    return

    async def _next_request(self, channel: Channel) -> FromReceiver | None:
        """Return the receiver's next message; None if it is lost, or has made no progress for `Ration.idle_seconds`."""
        loop = asyncio.get_running_loop()
        idle_from = loop.time()
        while True:
            try:
                return await channel.receive(FromReceiver, idle_from + self._ration.idle_seconds - loop.time(), 1024)
            except PeerLostError:
                return None
            except DeadlineError:
                if channel.last_progress <= idle_from:
                    return None
                idle_from = channel.last_progress
