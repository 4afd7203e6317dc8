"""Serving this peer's shared state to newcomers and laggards; `p2ptrain.training.sync.download` is the other side.

Chunks are copied out of the live state under its lock, 1 MiB at a time, because the network may still be reading a
buffer when a step is applied. Each one says which round it is of, so the state may move on in the middle of a download:
nothing is kept for the newcomer, which brings chunks of earlier rounds up to date itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

from p2ptrain.averaging.protocol.head import Head
from p2ptrain.errors import DeadlineError, PeerLostError, ProtocolError, TemporaryError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.network.schema import to_wire
from p2ptrain.network.transport import PeerId
from p2ptrain.runtime import Runtime
from p2ptrain.training.state.digest import CHUNK_BYTES, TensorSpec, cut_of
from p2ptrain.training.state.shared_state import SharedState, stamped_bytes

MAX_WAITS_FOR_A_ROUND = 1200
WAIT_SECONDS = 0.05
"""Between two looks at a state that a round is just changing."""

BUSY = "busy with a round: ask again in a moment"

MAX_RANGE_CHUNKS = 16
"""Chunks that may be asked for at once."""


@dataclass(frozen=True)
class ServeLimits:
    """What downloads may cost the peer that serves them."""

    downloads: int = 8
    """Served at once, each from a buffer of one chunk; more are refused."""
    downloads_per_peer: int = 2
    """Of which for one peer."""
    idle_seconds: float = 120.0
    """How long a download may ask for nothing."""
    bytes_per_second: float = 0.0
    """Upload of all downloads together; 0 for no limit."""


class StateServer:
    """Serves this peer's shared state: ``state.info`` (its head) and ``state.chunks`` (the bytes)."""

    def __init__(self, rpc: Rpc, state: SharedState, runtime: Runtime, limits: ServeLimits | None = None) -> None:
        self._state = state
        self._runtime = runtime
        self._limits = limits or ServeLimits()
        self._active: Counter[PeerId] = Counter()
        self._free_at = 0.0
        rpc.serve("state.info", dict, self._on_info, max_request_bytes=1024)
        rpc.serve_channel("state.chunks", dict, self._on_chunks, max_request_bytes=1024)

    def is_serving(self) -> bool:
        """Whether a download is under way."""
        return self._active.total() > 0

    async def _on_info(self, peer: PeerId, request: dict[str, Any]) -> dict[str, Any]:
        head, _ = await self._describe()
        return {"head": to_wire(head), "layout": self._state.layout.fingerprint}

    async def _describe(self) -> tuple[Head, tuple[TensorSpec, ...]]:
        for _ in range(MAX_WAITS_FOR_A_ROUND):
            await self._make_readable()
            if (described := self._state.describe()) is not None:
                return described
        raise TemporaryError(BUSY)

    async def _make_readable(self) -> None:
        """Wait a moment where a round changes the state, and see that it has a digest."""
        if not self._state.is_settled:
            await asyncio.sleep(WAIT_SECONDS)
        elif self._state.needs_tree():
            await self._runtime.compute(self._state.tree)
        elif self._state.is_being_changed():  # A step is being applied, in the state thread: queue behind it.
            await self._runtime.compute(int)

    async def _on_chunks(self, channel: Channel, request: dict[str, Any]) -> None:
        peer = channel.remote
        if self._active.total() >= self._limits.downloads or self._active[peer] >= self._limits.downloads_per_peer:
            raise TemporaryError("busy: too many downloads from this peer, ask again in a moment")
        self._active[peer] += 1
        try:
            await self._serve(channel, request.get("describe") is True)
        finally:
            self._active[peer] -= 1
            if not self._active[peer]:
                del self._active[peer]

    async def _serve(self, channel: Channel, describe: bool) -> None:
        _, specs = await self._describe()
        cut = cut_of(specs)
        tensors = [spec.to_list() for spec in specs] if describe else []
        await channel.send({"layout": self._state.layout.fingerprint, "tensors": tensors, "num_chunks": cut.num_chunks})
        buffer = memoryview(bytearray(stamped_bytes(CHUNK_BYTES, cut.depth)))
        chunks_left = 4 * cut.num_chunks + MAX_RANGE_CHUNKS  # More than any honest download needs.
        while True:
            try:
                request = await channel.receive(dict, self._limits.idle_seconds, 1024)
            except (PeerLostError, DeadlineError):
                return  # The newcomer has what it wants, or is gone.
            chunks = _asked_chunks(request, cut.num_chunks)
            if not 0 < len(chunks) <= min(MAX_RANGE_CHUNKS, chunks_left):
                raise ProtocolError(channel.remote, "asked for chunks that there are not, or too often")
            chunks_left -= len(chunks)
            for index in chunks:
                await self._send(channel, buffer[: await self._read(index, buffer, specs)])

    async def _read(self, index: int, buffer: memoryview, specs: tuple[TensorSpec, ...]) -> int:
        for _ in range(MAX_WAITS_FOR_A_ROUND):
            if (size := self._state.read(index, buffer, specs, wait=False)) >= 0:
                return size
            await self._make_readable()
        raise TemporaryError(BUSY)

    async def _send(self, channel: Channel, data: memoryview) -> None:
        """Send a chunk, in pieces of a second each where there is a limit, so that the newcomer sees it coming."""
        rate = self._limits.bytes_per_second
        piece = max(1, int(rate)) if rate else len(data)
        for start in range(0, len(data), piece):
            part = data[start : start + piece]
            if rate:
                now = asyncio.get_running_loop().time()
                self._free_at = max(self._free_at, now) + len(part) / rate
                await asyncio.sleep(self._free_at - now)
            await channel.send_bytes(part, more=start + len(part) < len(data))


def _asked_chunks(request: dict[str, Any], num_chunks: int) -> range:
    """The chunks that a request from the network names; empty when it is malformed."""
    first, count = request.get("first"), request.get("count")
    if type(first) is not int or type(count) is not int or not 0 <= first < first + count <= num_chunks:
        return range(0)
    return range(first, first + count)
