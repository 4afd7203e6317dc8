"""Serving this peer's shared state to newcomers and laggards; `p2ptrain.training.transfer` is the other side.

A download holds a lease on the round that it began with, so it gets consistent bytes while training goes on; when that
round's bytes are gone, it is refused with the number of the round that this peer moved on to. Chunks are copied out
under the state's lock, 1 MiB at a time, because the network may still be reading a buffer when a step is applied.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

from p2ptrain.errors import DeadlineError, PeerLostError, ProtocolError, TemporaryError
from p2ptrain.network.channel import Channel
from p2ptrain.network.rpc import Rpc
from p2ptrain.network.transport import PeerId
from p2ptrain.runtime import Runtime
from p2ptrain.training.digest import CHUNK_BYTES
from p2ptrain.training.state import SharedState, Snapshot

RESERVATION_SECONDS = 10.0
"""How long what was offered is kept for the download to begin."""

OFFERED_ROUNDS = 4
"""How old what others download already may be and still be offered."""

MAX_WAITS_FOR_A_ROUND = 5

MAX_RANGE_CHUNKS = 16
"""Chunks that may be asked for at once."""


@dataclass(frozen=True)
class ServeLimits:
    """What downloads may cost the peer that serves them."""

    downloads: int = 4
    """Served at once; more are refused."""
    downloads_per_peer: int = 2
    """Of which for one peer."""
    idle_seconds: float = 30.0
    """How long a download may ask for nothing."""
    total_seconds: float = 1800.0
    """How long one may take."""
    bytes_per_second: float = 0.0
    """Upload of all downloads together; 0 for no limit."""


class StateServer:
    """Serves this peer's shared state: ``state.info`` (the head that it offers) and ``state.chunks`` (the bytes).

    What is offered is reserved for a moment, and offered again to others for some rounds: newcomers share one copy, and
    none is too slow for a peer whose rounds are short.
    """

    def __init__(
        self,
        rpc: Rpc,
        state: SharedState,
        runtime: Runtime,
        limits: ServeLimits | None = None,
        offered_rounds: int = OFFERED_ROUNDS,
    ) -> None:
        self._state = state
        self._runtime = runtime
        self._limits = limits or ServeLimits()
        self._active: Counter[PeerId] = Counter()
        self._free_at = 0.0
        self._offered_rounds = offered_rounds
        self._reserved: Snapshot | None = None
        self._expiry: asyncio.TimerHandle | None = None
        rpc.serve("state.info", self._on_info, max_request_bytes=1024)
        rpc.serve_channel("state.chunks", self._on_chunks, max_request_bytes=1024)

    def close(self) -> None:
        """Keep nothing for anybody any more."""
        if self._expiry is not None:
            self._expiry.cancel()
        if self._reserved is not None:
            self._reserved.release()
        self._reserved = self._expiry = None

    async def _on_info(self, peer: PeerId, request: dict[str, Any]) -> dict[str, Any]:
        oldest = request.get("oldest_round", 0)
        if type(oldest) is not int:
            raise ProtocolError(peer, "asked for a state of a round that is no number")
        snapshot = await self._offer(oldest)
        self.close()
        self._reserved = snapshot
        self._expiry = asyncio.get_running_loop().call_later(RESERVATION_SECONDS, self.close)
        return {"head": snapshot.head.to_dict(), "layout": self._state.layout.fingerprint}

    async def _offer(self, oldest_round: int) -> Snapshot:
        for _ in range(MAX_WAITS_FOR_A_ROUND):
            if self._state.needs_tree():
                await self._runtime.compute(self._state.tree)
            try:
                return self._state.offer(max(oldest_round, self._state.head.round - self._offered_rounds))
            except TemporaryError:  # A round is being applied, in the compute thread: queue behind it.
                await self._runtime.compute(int)
        raise TemporaryError("busy with a round: ask again in a moment")

    async def _on_chunks(self, channel: Channel, request: dict[str, Any]) -> None:
        peer, lineage = channel.remote, request.get("lineage")
        if not isinstance(lineage, bytes):
            raise ProtocolError(peer, "asked for a state without naming its lineage")
        if self._active.total() >= self._limits.downloads or self._active[peer] >= self._limits.downloads_per_peer:
            raise TemporaryError("busy: too many downloads from this peer, ask again in a moment")
        self._active[peer] += 1
        try:
            if self._state.needs_tree():
                await self._runtime.compute(self._state.tree)
            snapshot = self._state.lease(lineage)
            try:
                async with asyncio.timeout(self._limits.total_seconds):
                    await self._serve(channel, snapshot, bool(request.get("describe")))
            except TimeoutError:
                raise TemporaryError(f"the download took more than {self._limits.total_seconds:g} s") from None
            finally:
                snapshot.release()
        finally:
            self._active[peer] -= 1
            if not self._active[peer]:
                del self._active[peer]

    async def _serve(self, channel: Channel, snapshot: Snapshot, describe: bool) -> None:
        tensors = [spec.to_list() for spec in snapshot.specs] if describe else []
        await channel.send(
            {"layout": self._state.layout.fingerprint, "tensors": tensors, "num_chunks": snapshot.num_chunks}
        )
        buffer = memoryview(bytearray(CHUNK_BYTES))
        # Every chunk twice and the hashes once: more than any honest download needs.
        chunks_left, leaves_left = 2 * snapshot.num_chunks, 1
        while True:
            try:
                request = await channel.receive(self._limits.idle_seconds, 1024)
            except (PeerLostError, DeadlineError):
                return  # The newcomer has what it wants, or is gone.
            if request.get("leaves") is True and leaves_left:
                leaves_left -= 1
                await channel.send_bytes(b"".join(snapshot.tree.leaves))
                continue
            chunks = _asked_chunks(request, snapshot.num_chunks)
            if not 0 < len(chunks) <= min(MAX_RANGE_CHUNKS, chunks_left):
                raise ProtocolError(channel.remote, "asked for chunks that there are not, or too often")
            chunks_left -= len(chunks)
            for index in chunks:
                size = await self._read(snapshot, index, buffer)
                await self._pace(size)
                await channel.send_bytes(buffer[:size])

    async def _read(self, snapshot: Snapshot, index: int, buffer: memoryview) -> int:
        size = snapshot.read(index, buffer, wait=False)
        if size < 0:  # A step is being applied, in the compute thread: queue behind it.
            size = await self._runtime.compute(snapshot.read, index, buffer)
        return size

    async def _pace(self, num_bytes: int) -> None:
        if self._limits.bytes_per_second:
            now = asyncio.get_running_loop().time()
            self._free_at = max(self._free_at, now) + num_bytes / self._limits.bytes_per_second
            await asyncio.sleep(self._free_at - now)


def _asked_chunks(request: dict[str, Any], num_chunks: int) -> range:
    """The chunks that a request from the network names; empty when it is malformed."""
    first, count = request.get("first"), request.get("count")
    if type(first) is not int or type(count) is not int or not 0 <= first < first + count <= num_chunks:
        return range(0)
    return range(first, first + count)
