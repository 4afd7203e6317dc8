"""A peer that holds the shared state gives its weights to peers that serve without training.

A source copies the vector once for all receivers, into an unlinked file of its run directory. The copy lasts while
receivers fetch it. A receiver names the rounds that it takes, so that all sources and all stages copy the same ones.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.buffers import file_buffer, new_buffer
from p2ptrain.errors import PeerRefusedError, ResourceError
from p2ptrain.network.chunks.messages import Open
from p2ptrain.network.chunks.server import ChunkServer, Ration
from p2ptrain.network.schema import Count, Message
from p2ptrain.node.peer import Peer
from p2ptrain.node.serving.held import Held, key_of, newest
from p2ptrain.serving.host.session import Key
from p2ptrain.tasks import Tasks
from p2ptrain.training.state.layout import Layout
from p2ptrain.training.state.shared_state import Snapshot
from p2ptrain.training.sync.weights import WEIGHTS, WeightSupply

COPY = "weights.copy"
WAIT_SECONDS = 20.0
"""Longest wait for a round that the receiver takes; < the receiver's timeout."""
LOOK_SECONDS = 0.05
IDLE_SECONDS = 10.0
"""Age of a head that is copied whatever its round: training rests; < `WAIT_SECONDS`."""
KEPT_SECONDS = 10.0
"""Time after its last transfer for which a copy is kept; > a receiver's pause between two tries, < a version's time."""
MAX_UNITS = 4
RATION = Ration(transfers=8, transfers_per_peer=MAX_UNITS)


class AskCopy(Message, frozen=True):
    """Request to copy a stage's weights at a round that ``every`` divides.

    ``has`` is the digest of the receiver's version; empty for none, which takes any round.
    """

    stage: Count
    every: Annotated[int, Meta(ge=1, le=1 << 40)]
    has: Annotated[bytes, Meta(max_length=32)] = b""


class Copied(Message, frozen=True):
    """The heads of the copied units, the stage's own first; none if there is nothing newer yet."""

    heads: Annotated[tuple[Head, ...], Meta(max_length=MAX_UNITS)] = ()


@dataclass
class _Copy:
    key: Key
    units: list[tuple[Layout, Snapshot]]
    used_at: float


class WeightSource:
    """Serves the weights that a peer trains or hosts, from construction on; the peer's end closes it."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._held: Held | None = None
        self._copy: _Copy | None = None
        self._copying = asyncio.Lock()
        self._key: Key | None = None
        self._since = 0.0
        self._tasks = Tasks()
        self._chunks = ChunkServer(peer.rpc, WEIGHTS, self._open, RATION)
        peer.rpc.serve(COPY, AskCopy, self._on_copy, max_request_bytes=1024)
        peer.on_close(self._tasks.close)

    async def _on_copy(self, peer: str, request: AskCopy) -> Copied:
        deadline = asyncio.get_running_loop().time() + WAIT_SECONDS
        while asyncio.get_running_loop().time() < deadline:
            held = self._now(request.stage)
            if (copy := self._copy) is not None and copy.key[1] != request.has and self._is_in_use(copy):
                return Copied(tuple(snapshot.head for _, snapshot in copy.units))
            if self._is_due(held, request) and await self._take(held):
                continue
            await asyncio.sleep(LOOK_SECONDS)
        return Copied()

    def _now(self, stage: int) -> Held:
        """Return what this peer holds; raise `PeerRefusedError` if that is not this stage."""
        held = self._held = newest(self._peer, self._held)
        if held is None or held.number != stage:
            raise PeerRefusedError(self._peer.identity.peer_id, f"holds no weights of stage {stage}")
        now = asyncio.get_running_loop().time()
        if held.key != self._key:
            self._key, self._since = held.key, now
        return held

    def _is_due(self, held: Held, request: AskCopy) -> bool:
        if held.key[1] == request.has or (self._copy is not None and self._is_in_use(self._copy)):
            return False
        is_at_rest = asyncio.get_running_loop().time() - self._since >= IDLE_SECONDS
        return not request.has or held.key[0] % request.every == 0 or is_at_rest

    def _is_in_use(self, copy: _Copy) -> bool:
        """True if receivers fetch the copy, or may come back to it."""
        now = asyncio.get_running_loop().time()
        if self._chunks.active:
            copy.used_at = now
        return now - copy.used_at < KEPT_SECONDS

    async def _take(self, held: Held) -> bool:
        """Copy the weights; return False while a round changes them."""
        async with self._copying:
            if self._copy is not None and self._is_in_use(self._copy):
                return True
            self._copy = None
            units = await self._peer.runtime.compute(self._snapshots, held)
            if units is None:
                return False
            key = key_of([snapshot.head for _, snapshot in units])
            self._copy = _Copy(key, units, asyncio.get_running_loop().time())
            self._tasks.start(self._drop_unused(self._copy), "weights")
            return True

    def _snapshots(self, held: Held) -> list[tuple[Layout, Snapshot]] | None:
        if not held.is_whole():
            return None
        found = [(state.layout, state.snapshot(self._allocate)) for state in held.states]
        units = [(layout, snapshot) for layout, snapshot in found if snapshot is not None]
        return units if len(units) == len(found) else None

    def _allocate(self, num_bytes: int) -> memoryview:
        return unlinked_memory(self._peer, num_bytes)

    async def _drop_unused(self, copy: _Copy) -> None:
        while self._is_in_use(copy):  # noqa: ASYNC110
            await asyncio.sleep(KEPT_SECONDS / 8)
        if self._copy is copy:
            self._copy = None

    async def _open(self, request: Open) -> WeightSupply:
        """Return the supply of a unit's digest; copy the weights if it is that of the state now."""
        if (supply := self._supply(request.key)) is not None:
            return supply
        held = self._held = newest(self._peer, self._held)
        if held is not None and request.key in {state.head.digest for state in held.states}:
            await self._take(held)
            if (supply := self._supply(request.key)) is not None:
                return supply
        raise PeerRefusedError(self._peer.identity.peer_id, "holds other weights now")

    def _supply(self, digest: bytes) -> WeightSupply | None:
        for layout, snapshot in self._copy.units if self._copy is not None else ():
            if snapshot.head.digest == digest:
                return WeightSupply(layout, snapshot)
        return None


def unlinked_memory(peer: Peer, num_bytes: int) -> memoryview:
    """Return memory of an unlinked file in the peer's run directory, or without one of the process.

    Raises:
        ResourceError: The disk is full.
    """
    folder = peer.runtime.scratch
    if folder is None:
        return new_buffer(num_bytes)
    path = folder / "weights"
    try:
        path.unlink(missing_ok=True)
        memory = file_buffer(path, max(num_bytes, 1))[:num_bytes]
        path.unlink()
    except OSError as error:
        raise ResourceError(
            f"cannot keep weights of {num_bytes >> 20} MiB in {folder} ({error.strerror}): free some space"
        ) from error
    return memory
