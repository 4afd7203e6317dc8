"""Transfer of the vector alone, for peers that serve a model and do not train it.

A source holds a `Snapshot`, so all chunks are of one round. A chunk on the wire is a run of the vector, the hash of the
chunk's other bytes, and the proof up to the digest in the snapshot's head. The receiver needs no optimizer state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import numpy as np

from p2ptrain.errors import IncompatibleError, IntegrityError, ProtocolError, TemporaryError
from p2ptrain.hashing import HASH_BYTES
from p2ptrain.network.chunks.fetch import BadContentError, FetchOptions
from p2ptrain.network.chunks.messages import Ask
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.progress import Advance
from p2ptrain.runtime import Runtime
from p2ptrain.training.state.digest import (
    CHUNK_BYTES,
    Cut,
    Description,
    TensorSpec,
    cut_of,
    description_hash,
    leaf_of,
    proves,
)
from p2ptrain.training.state.layout import Layout
from p2ptrain.training.state.shared_state import SPEC_BYTES, VECTOR_NAME, Snapshot
from p2ptrain.training.sync.state_server import HeldState

WEIGHTS = "weights"
"""Service name of the vector's chunks; a snapshot's key is its digest."""
MAX_STATE_RATIO = 8
"""Bound on the size of a described state, as a multiple of its vector."""
MAX_TENSORS_PER_ENTRY = 4
"""Bound on the tensors of a described state, as a multiple of those of the model."""


def wire_bytes(cut: Cut, index: int) -> int:
    """Return the size of a chunk on the wire: its run of the vector, the hash of the rest, the proof."""
    start, stop = cut.run(index)
    return stop - start + HASH_BYTES * (1 + cut.depth)


class WeightSupply:
    """The chunks of a snapshot; implements `p2ptrain.network.chunks.server.Supply`."""

    def __init__(self, layout: Layout, snapshot: Snapshot, until_ready: Callable[[], Awaitable[None]]) -> None:
        """Before each chunk ``until_ready`` waits for more urgent traffic, or ends the transfer with an error."""
        self._layout = layout
        self._snapshot = snapshot
        self._until_ready = until_ready
        self._cut = cut_of(snapshot.specs)
        self.num_chunks = self._cut.num_chunks

    async def describe(self) -> HeldState:
        return HeldState(self._layout.fingerprint, Description(self._snapshot.specs))

    async def read(self, index: int) -> bytes:
        await self._until_ready()
        start, stop = self._cut.run(index)
        tree = self._snapshot.tree
        return b"".join((self._snapshot.vector[start:stop], tree.rests[index], tree.proof(index)))


class WeightTarget:
    """Receives the vector of one digest into ``memory``; implements `p2ptrain.network.chunks.fetch.Target`.

    Chunks stay if a fetch fails, so the next one continues with other sources.
    """

    asks_at_once = False
    most_bytes = CHUNK_BYTES + HASH_BYTES * 64

    def __init__(
        self, runtime: Runtime, layout: Layout, digest: bytes, memory: memoryview, advance: Advance = lambda *_: None
    ) -> None:
        """``memory`` has exactly the vector's size; ``advance`` receives verified and total bytes."""
        self.done = bytearray()
        self.expected_bytes = len(memory)
        self._runtime = runtime
        self._layout = layout
        self._digest = digest
        self._memory = memory
        self._advance = advance
        self._specs: tuple[TensorSpec, ...] = ()
        self._description = b""
        self._bytes_done = 0
        self._vector_specs = (TensorSpec(VECTOR_NAME, "float32", (layout.num_values,)),)

    @property
    def is_complete(self) -> bool:
        return bool(self.done) and all(self.done)

    def wire_bytes(self, index: int) -> int:
        return wire_bytes(cut_of(self._specs), index)

    async def wait_for_turn(self) -> None:
        """Return at once: nothing is more urgent on a peer that only serves."""

    async def agree(self, channel: Channel, options: FetchOptions) -> int:
        """Receive and check a source's description; the first chunk proves the first one."""
        source, layout = channel.remote, self._layout
        longest = max((len(entry.name.encode()) for entry in layout.entries), default=0)
        limit = (2 + MAX_TENSORS_PER_ENTRY * len(layout.entries)) * (longest + SPEC_BYTES)
        held = await channel.receive(HeldState, options.open_seconds, limit)
        specs, num_bytes = held.description.tensors, 0
        if held.layout != layout.fingerprint or specs[:1] != self._vector_specs:
            raise IncompatibleError(f"peer {source[-8:]} holds a model of another shape")
        if held.description.num_bytes > MAX_STATE_RATIO * (len(self._memory) + CHUNK_BYTES):
            raise ProtocolError(source, "described a state that is too large for its model")
        if not self._specs:
            num_bytes = await self._take_first(channel, specs, options)
        if specs != self._specs:
            raise TemporaryError(f"peer {source[-8:]} holds a state of other tensors")
        return num_bytes

    async def _take_first(self, channel: Channel, specs: tuple[TensorSpec, ...], options: FetchOptions) -> int:
        cut = cut_of(specs)
        if (index := next((each for each in range(cut.num_chunks) if any(cut.run(each))), None)) is None:
            raise IntegrityError(f"peer {channel.remote[-8:]} described a state of nothing")
        buffer = memoryview(bytearray(wire_bytes(cut, index)))
        await channel.send(Ask([index]))
        await channel.receive_steadily(buffer, options.least)
        if not await self._runtime.offload(self._is_right, specs, description_hash(specs), index, buffer):
            raise IntegrityError(f"peer {channel.remote[-8:]} described a state that has not the digest asked for")
        if self._specs:
            return 0
        self._specs, self._description = specs, description_hash(specs)
        self.done[:] = bytes(not any(cut.run(each)) for each in range(cut.num_chunks))
        return await self.put(channel.remote, index, buffer)

    async def put(self, source: str, index: int, received: memoryview) -> int:
        if not await self._runtime.offload(self._is_right, self._specs, self._description, index, received):
            raise IntegrityError(f"peer {source[-8:]} sent weights that do not match their hash")
        start, stop = cut_of(self._specs).run(index)
        if self.done[index]:
            return 0
        if not bool(np.isfinite(np.frombuffer(received[: stop - start], dtype=np.float32)).all()):
            raise BadContentError("the weights to be downloaded have values that are not finite")
        self._memory[start:stop] = received[: stop - start]
        self.done[index] = 1
        self._bytes_done += stop - start
        self._advance(self._bytes_done, len(self._memory))
        return stop - start

    def _is_right(self, specs: tuple[TensorSpec, ...], description: bytes, index: int, received: memoryview) -> bool:
        cut = cut_of(specs)
        start, stop = cut.run(index)
        run, rest, proof = received[: stop - start], received[stop - start :][:HASH_BYTES], received[stop - start :]
        leaf = leaf_of(run, bytes(rest))
        return proves(description, leaf, index, cut.num_chunks, proof[HASH_BYTES:], self._digest)
