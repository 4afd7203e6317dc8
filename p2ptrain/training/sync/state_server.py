"""A peer's account of its shared state: the fingerprint of its layout, its head, and its chunks.

`p2ptrain.training.sync.download` is the client for chunks. Each chunk is copied out of the live state under its lock,
because a later step may overwrite a buffer that the network still reads. Each chunk carries its round, so the state may
advance during a download. The server keeps no snapshot: the newcomer brings chunks of earlier rounds up to date.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta

from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.averaging.protocol.table import MAX_COUNT, Table
from p2ptrain.errors import DeadlineError, IncompatibleError, IntegrityError, PeerError, TemporaryError
from p2ptrain.network.chunks.messages import Open
from p2ptrain.network.chunks.server import ChunkServer
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.schema import Hash, Message, Nothing
from p2ptrain.tasks import together
from p2ptrain.training.optimizer_checks import differences
from p2ptrain.training.state.digest import CHUNK_BYTES, Description, TensorSpec, cut_of
from p2ptrain.training.state.shared_state import SharedState, stamped_bytes

logger = logging.getLogger(__name__)

LAYOUT = "layout.compare"
HEAD = "state.head"
STATE = "state"
"""Service name of the state's chunks."""

CALL_SECONDS = 5.0
HEAD_SECONDS = 10.0
MAX_ASKED = 4
MAX_LAYOUT_BYTES = 2 << 20
MAX_HEAD_BYTES = 4 << 20
MAX_WAITS_FOR_A_ROUND = 1200
WAIT_SECONDS = 0.05
"""Poll interval while a round changes the state; `MAX_WAITS_FOR_A_ROUND` polls make the timeout."""

BUSY = "busy with a round: ask again in a moment"


class LayoutReply(Message, frozen=True):
    """The fingerprint of a peer's layout, and its step rule (see `step_rule`)."""

    fingerprint: Hash
    rule: Annotated[str, Meta(max_length=1 << 20)]


class HeldHead(Message, frozen=True):
    """Reply with the head of a peer's state."""

    head: Head


class HeldState(Message, frozen=True):
    """Description of a source's state, sent before its chunks; ``layout`` is the fingerprint of its layout."""

    layout: Hash
    description: Description


class StateServer:
    """Serves this peer's shared state: its layout, its head, and its chunks."""

    def __init__(self, rpc: Rpc, state: SharedState) -> None:
        self._runtime, self._state = rpc.runtime, state
        rpc.serve(LAYOUT, Nothing, self._on_layout)
        rpc.serve(HEAD, Nothing, self._on_head, max_request_bytes=1024)
        self.chunks = ChunkServer(rpc, STATE, self._open)

    async def _on_layout(self, peer: str, request: Nothing) -> LayoutReply:
        return LayoutReply(self._state.layout.fingerprint, self._state.layout.rule)

    async def _on_head(self, peer: str, request: Nothing) -> HeldHead:
        return HeldHead((await self.describe())[0])

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
        elif self._state.needs_tree:
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


async def check_agreement(rpc: Rpc, state: SharedState, trainers: Sequence[str]) -> None:
    """Ask up to `MAX_ASKED` trainers; raise `IncompatibleError` if all that answer differ in layout or step rule."""
    layout = state.layout

    async def ask(peer: str) -> LayoutReply | None:
        try:
            return await rpc.call(peer, LAYOUT, Nothing(), LayoutReply, CALL_SECONDS, max_reply_bytes=MAX_LAYOUT_BYTES)
        except (PeerError, DeadlineError) as error:
            logger.debug("peer %s does not say what it trains: %s", peer[-8:], error)
            return None

    asked = await together("compare", map(ask, trainers[:MAX_ASKED]))
    answers = [answer for answer in asked if answer is not None]
    if not answers or any(answer.fingerprint == layout.fingerprint for answer in answers):
        return
    rule = answers[0].rule
    if rule != layout.rule:
        raise IncompatibleError(
            f"with every = 1 all peers take the same step, and this one would take another: "
            f"{differences(layout.rule, rule)}; give Swarm.optimizer the optimizer and clip_norm of the others"
        )
    raise IncompatibleError(
        f"peer {trainers[0][-8:]} trains a model of another shape: build the model that the swarm's manifest describes"
    )


async def fetch_head(rpc: Rpc, source: str) -> Head:
    """Return the head of a peer's state, unverified; raise the errors of `Rpc.call`."""
    held = await rpc.call(source, HEAD, Nothing(), HeldHead, HEAD_SECONDS, max_reply_bytes=MAX_HEAD_BYTES)
    return held.head


def count_digests(digests: Mapping[str, bytes], table: Table) -> Counter[bytes]:
    """Return how many peers tell each digest, from ``digests`` by peer.

    Only members that may lead count, if some are there: the others may be a crowd of newcomers.
    """
    leading = digests.keys() & table.leading
    return Counter(digest for peer, digest in digests.items() if peer in leading or not leading)


def announced_digests(context: PeerContext, head: Head) -> Counter[bytes]:
    """Return how many other peers announce each digest at a head's lineage; see `count_digests`."""
    records = context.membership.records()
    return count_digests({each.peer: each.digest for each in records if each.lineage == head.lineage}, head.table)


def check_head(context: PeerContext, head: Head) -> None:
    """Raise `IntegrityError` unless a head follows from its certificate, and no other digest has more votes there.

    Whether the certificate counts is another question: see `RoundLog.believe`. A head in the upper half of its numbers'
    range is refused: with the last one that a certificate allows, a stranger could end all training, because no later
    round would fit.
    """
    if max(head.round, head.tokens, head.samples) > MAX_COUNT // 2:
        raise IntegrityError("a head leaves too little room for the rounds after it")
    votes = announced_digests(context, head)
    if votes and votes[head.digest] < max(votes.values()):
        raise IntegrityError("most peers announce another digest for this state")
    context.anchors.check_digest(head)
    if head.round == 0:
        if head != context.genesis(head.digest):
            raise IntegrityError("a head at round 0 is not a beginning")
    elif context.certificate(head.certificate).next_head(head.digest, head.table) != head:
        raise IntegrityError("a head does not follow from its certificate")
