"""A peer that holds the shared state gives its weights to peers that serve without training.

A source keeps one copy of the vector for all receivers, in an unlinked file of its run directory. A receiver names the
rounds that it takes, so all sources and all stages copy the same ones. Copies take at most `COPY_SHARE` of the time of
the state's thread, whoever asks, and no receiver keeps a copy in place for longer than a slow download takes.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.errors import PeerRefusedError, ResourceError, TemporaryError
from p2ptrain.network.chunks.messages import Open
from p2ptrain.network.chunks.server import ChunkServer, Ration
from p2ptrain.network.schema import Count, Message
from p2ptrain.node.serving.held import Held, key_of, newest
from p2ptrain.node.serving.kept import unlinked_memory
from p2ptrain.tasks import Tasks
from p2ptrain.training.state.layout import Layout
from p2ptrain.training.state.shared_state import Snapshot
from p2ptrain.training.sync.weights import WEIGHTS, WeightSupply

if TYPE_CHECKING:
    from p2ptrain.node.peer import Peer

logger = logging.getLogger(__name__)

COPY = "weights.copy"
WAIT_SECONDS = 20.0
"""Longest wait for a round that the receiver takes; < the receiver's timeout."""
LOOK_SECONDS = 0.05
IDLE_SECONDS = 10.0
"""Age of a head that is copied whatever its round: training rests; < `WAIT_SECONDS`."""
KEPT_SECONDS = 10.0
"""Time after its last transfer for which a copy is kept; > a receiver's pause between two tries."""
LEAST_BYTES_PER_SECOND = 200_000
"""Rate of the slowest download for which a copy stays in place."""
YIELD_SECONDS = 1.5
"""Longest pause of a transfer before a chunk, while a round sends its parts."""
COPY_SHARE = 0.02
"""Most of the time of the state's thread, and thus of the rounds, that copies take."""
MAX_WAITING = 16
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
    """Copied units, their version's digest, and the loop times until which they are kept: unused, and at most."""

    digest: bytes
    units: list[tuple[Layout, Snapshot]]
    unused_until: float
    until: float


class WeightSource:
    """Serves the weights that a peer trains or hosts, from construction on; the peer's end closes it."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._held: Held | None = None
        self._copy: _Copy | None = None
        self._copying = asyncio.Lock()
        self._may_copy_at = 0.0
        self._newest_digest = b""
        self._since = 0.0
        self._waiting: set[str] = set()
        self._tasks = Tasks()
        self._chunks = ChunkServer(peer.rpc, WEIGHTS, self._open, RATION)
        peer.rpc.serve(COPY, AskCopy, self._on_copy, max_request_bytes=1024)
        peer.on_close(self._tasks.close)

    async def _on_copy(self, peer: str, request: AskCopy) -> Copied:
        if peer in self._waiting or len(self._waiting) >= MAX_WAITING:
            raise TemporaryError("busy: too many peers wait for weights, ask again in a moment")
        self._waiting.add(peer)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while not (copy := self._taken(request)):
                    await self._take_if(request)
                    await asyncio.sleep(LOOK_SECONDS)
                return Copied(tuple(snapshot.head for _, snapshot in copy.units))
        except TimeoutError:
            return Copied()
        finally:
            self._waiting.discard(peer)

    def _taken(self, request: AskCopy) -> _Copy | None:
        """Return the copy, if it is another version than the receiver's."""
        copy = self._copy
        return copy if copy is not None and copy.digest != request.has and self._is_in_use(copy) else None

    async def _take_if(self, request: AskCopy) -> None:
        """Copy the weights if the receiver takes their round; raise `PeerRefusedError` if it wants another stage."""
        held = self._newest()
        if held is None or held.number != request.stage:
            raise PeerRefusedError(self._peer.identity.peer_id, f"holds no weights of stage {request.stage}")
        now = asyncio.get_running_loop().time()
        number, digest = held.key
        if digest != self._newest_digest:
            self._newest_digest, self._since = digest, now
        is_at_rest = now - self._since >= IDLE_SECONDS
        if digest != request.has and (not request.has or number % request.every == 0 or is_at_rest):
            await self._take(held, digest if request.has else b"")

    def _newest(self) -> Held | None:
        self._held = newest(self._peer, self._held)
        return self._held

    def _is_in_use(self, copy: _Copy) -> bool:
        """True if receivers fetch the copy, or may come back to it."""
        now = asyncio.get_running_loop().time()
        if self._chunks.active:
            copy.unused_until = now + KEPT_SECONDS
        return now < min(copy.until, copy.unused_until)

    async def _take(self, held: Held, digest: bytes) -> None:
        """Copy the weights, unless a copy is in use, copies take too much time, or a round changes the weights.

        A version with another digest than this one is not copied; empty for any.
        """
        async with self._copying:
            now = asyncio.get_running_loop().time()
            if now < self._may_copy_at or (self._copy is not None and self._is_in_use(self._copy)):
                return
            self._copy, self._may_copy_at = None, now + KEPT_SECONDS
            try:
                units, seconds = await self._peer.runtime.compute(self._snapshots, held, digest)
            except ResourceError as error:
                logger.warning("no weights for peers that only serve: %s", error)
                raise TemporaryError("this peer has no room for a copy now") from error
            now = asyncio.get_running_loop().time()
            self._may_copy_at = now + seconds / COPY_SHARE
            if units:
                longest = KEPT_SECONDS + sum(len(each.vector) for _, each in units) / LEAST_BYTES_PER_SECOND
                _, digest = key_of([snapshot.head for _, snapshot in units])
                self._copy = _Copy(digest, units, now + KEPT_SECONDS, now + longest)
                self._tasks.start(self._drop_unused(self._copy), "weights")

    def _snapshots(self, held: Held, digest: bytes) -> tuple[list[tuple[Layout, Snapshot]], float]:
        """Return a snapshot of each unit, and the seconds that this took; none if a round changes or changed one."""
        runtime = self._peer.runtime
        began, units = runtime.clock(), list[tuple[Layout, Snapshot]]()
        is_wanted = held.is_whole() and digest in (b"", held.key[1])
        for state in held.states if is_wanted else ():
            if (snapshot := state.snapshot(lambda size: unlinked_memory(runtime.scratch, size))) is None:
                return [], runtime.clock() - began
            units.append((state.layout, snapshot))
        return units, runtime.clock() - began

    async def _drop_unused(self, copy: _Copy) -> None:
        while self._is_in_use(copy):  # noqa: ASYNC110
            await asyncio.sleep(KEPT_SECONDS / 8)
        if self._copy is copy:
            self._copy = None

    async def _open(self, request: Open) -> WeightSupply:
        """Return the supply of a unit's digest; copy the weights if it is that of the state now."""
        if (supply := self._supply(request.key)) is None:
            held = self._newest()
            if held is not None and request.key in {state.head.digest for state in held.states}:
                await self._take(held, held.key[1])
                supply = self._supply(request.key)
        if supply is None:
            raise PeerRefusedError(self._peer.identity.peer_id, "holds other weights now")
        return supply

    def _supply(self, digest: bytes) -> WeightSupply | None:
        copy = self._copy
        for layout, snapshot in copy.units if copy is not None else ():
            if snapshot.head.digest == digest:
                return WeightSupply(layout, snapshot, lambda: self._until_ready(copy))
        return None

    async def _until_ready(self, copy: _Copy | None) -> None:
        """Wait while this peer averages, for up to `YIELD_SECONDS`; raise `TemporaryError` if the copy is dropped."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + YIELD_SECONDS
        while self._is_averaging() and loop.time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)
        if self._copy is not copy:
            raise TemporaryError("these weights are not kept any more: ask for newer ones")

    def _is_averaging(self) -> bool:
        held = self._peer.held
        of_stages = [unit.synchronizer for stage in held.stages for unit in stage.units]
        averaging = of_stages or filter(None, [held.synchronizer])
        return any(each.averager.phase not in ("idle", "matchmaking") for each in averaging)
