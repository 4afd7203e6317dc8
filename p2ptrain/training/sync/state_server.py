"""The server of a peer's shared state; `p2ptrain.training.sync.download` is the client.

Each chunk is copied out of the live state under its lock, because a later step may overwrite a buffer that the
network still reads. Each chunk carries its round, so the state may advance during a download. The server keeps no
snapshot: the newcomer brings chunks of earlier rounds up to date.
"""

from __future__ import annotations

import asyncio

from p2ptrain.errors import TemporaryError
from p2ptrain.network.chunks.messages import Open
from p2ptrain.network.chunks.server import ChunkServer, Ration
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.schema import Hash, Message, Nothing
from p2ptrain.network.transport import PeerId
from p2ptrain.training.state.digest import CHUNK_BYTES, Description, TensorSpec, cut_of
from p2ptrain.training.state.shared_state import Head, SharedState, stamped_bytes
from p2ptrain.training.sync.agreement import serve_agreement
from p2ptrain.training.sync.heads import STATE_HEAD, HeldHead

STATE = "state"
"""Service name of the state's chunks."""
MAX_WAITS_FOR_A_ROUND = 1200
WAIT_SECONDS = 0.05
"""Poll interval while a round changes the state; `MAX_WAITS_FOR_A_ROUND` polls make the timeout."""

BUSY = "busy with a round: ask again in a moment"


class HeldState(Message, frozen=True):
    """Description of a source's state, sent before its chunks; ``layout`` is the fingerprint of its layout."""

    layout: Hash
    description: Description


class StateServer:
    """Serves this peer's shared state: its layout, its head, and its chunks."""

    def __init__(self, rpc: Rpc, state: SharedState, ration: Ration | None = None) -> None:
        self._runtime = rpc.runtime
        self._state = state
        serve_agreement(rpc, state.layout)
        rpc.serve(STATE_HEAD, Nothing, self._on_head, max_request_bytes=1024)
        self.chunks = ChunkServer(rpc, STATE, self._open, ration or Ration())

    async def _on_head(self, peer: PeerId, request: Nothing) -> HeldHead:
        head, _ = await self.describe()
        return HeldHead(head)

    async def _open(self, request: Open) -> _Supply:
        _, specs = await self.describe()
        return _Supply(self, self._state.layout.fingerprint, specs)

    async def describe(self) -> tuple[Head, tuple[TensorSpec, ...]]:
        """Return the state's head and tensors; wait while a round changes it."""
        for _ in range(MAX_WAITS_FOR_A_ROUND):
            await self._make_readable()
            if (described := self._state.describe()) is not None:
                return described
        raise TemporaryError(BUSY)

    async def read(self, index: int, buffer: memoryview, specs: tuple[TensorSpec, ...]) -> int:
        """Copy a chunk with stamp and proof to the buffer once no round changes the state; return the size."""
        for _ in range(MAX_WAITS_FOR_A_ROUND):
            if (size := self._state.read(index, buffer, specs, wait=False)) >= 0:
                return size
            await self._make_readable()
        raise TemporaryError(BUSY)

    async def _make_readable(self) -> None:
        """Wait briefly if a round changes the state, and compute its digest if that is missing."""
        if not self._state.is_settled:
            await asyncio.sleep(WAIT_SECONDS)
        elif self._state.needs_tree():
            await self._runtime.compute(self._state.tree)
        elif self._state.is_being_changed():  # The state thread applies a step: queue behind it.
            await self._runtime.compute(int)


class _Supply:
    """One transfer, with a buffer of one chunk; implements `p2ptrain.network.chunks.server.Supply`."""

    def __init__(self, server: StateServer, layout: bytes, specs: tuple[TensorSpec, ...]) -> None:
        self._server = server
        self._layout = layout
        self._specs = specs
        cut = cut_of(specs)
        self.num_chunks = cut.num_chunks
        self._buffer = memoryview(bytearray(stamped_bytes(CHUNK_BYTES, cut.depth)))

    async def describe(self) -> HeldState:
        return HeldState(self._layout, Description(self._specs))

    async def read(self, index: int) -> memoryview:
        return self._buffer[: await self._server.read(index, self._buffer, self._specs)]
