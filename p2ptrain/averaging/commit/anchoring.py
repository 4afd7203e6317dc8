"""Exchange of anchors: peers ask those whose records, or replies to requests for votes, claim a newer one."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated

from msgspec import Meta

from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.protocol.anchors import Anchor
from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.errors import DeadlineError, IntegrityError, PeerError, PeerRefusedError
from p2ptrain.network.schema import Message, Nothing
from p2ptrain.tasks import Tasks, together

logger = logging.getLogger(__name__)

ANCHORS = "anchors"
CALL_SECONDS = 5.0
MAX_ASKED = 3
MAX_HELD = 3
MAX_BYTES = 16 << 20


class HeldAnchors(Message, frozen=True):
    """Reply with `AnchorBook.held`."""

    anchors: Annotated[tuple[Anchor, ...], Meta(max_length=MAX_HELD)]


def serve_anchors(context: PeerContext) -> None:
    """Answer questions for the newest anchor from now on."""
    anchors = context.anchors

    async def answer(peer: str, request: Nothing) -> HeldAnchors:
        return HeldAnchors(anchors.held())

    context.rpc.serve(ANCHORS, Nothing, answer)


class AnchorSearch:
    """Asks other peers for newer anchors."""

    def __init__(self, context: PeerContext, tasks: Tasks) -> None:
        self._context = context
        self._tasks = tasks
        self._asked: dict[str, bytes] = {}
        self._running: asyncio.Task[None] | None = None

    async def look(self, own: Head) -> None:
        """Ask for newer anchors, in the background but for a newcomer: none of its own heads is proved yet."""
        membership, anchors = self._context.membership, self._context.anchors
        if self._running is None or self._running.done():
            records = [record for record in membership.records() if not membership.is_mistrusted(record.peer)]
            claims = {record.peer: record.anchor for record in records} | anchors.claims
            wanted = {peer: claim for peer, claim in claims.items() if anchors.wants(claim)}
            peers = sorted(peer for peer, claim in wanted.items() if self._asked.get(peer) != claim)[:MAX_ASKED]
            if not peers:
                return
            self._asked = {peer: claim for peer, claim in self._asked.items() if peer in claims}
            self._asked.update((peer, wanted[peer]) for peer in peers)
            self._running = self._tasks.start(self._ask(peers, own), "anchors")
        if own.round == 0:
            await asyncio.wait([self._running])

    async def _ask(self, peers: list[str], own: Head) -> None:
        await together("anchor", (self._ask_one(peer, own) for peer in peers))

    async def _ask_one(self, peer: str, own: Head) -> None:
        context = self._context
        try:
            reply = await context.rpc.call(
                peer, ANCHORS, Nothing(), HeldAnchors, CALL_SECONDS, max_reply_bytes=MAX_BYTES
            )
            for anchor in reply.anchors:
                await context.runtime.offload(context.anchors.take, anchor, own)
        except PeerRefusedError as error:
            logger.debug("peer %s tells no anchor: %s", peer[-8:], error)
        except (PeerError, DeadlineError) as error:
            logger.debug("peer %s tells no anchor: %s", peer[-8:], error)
            self._asked.pop(peer, None)
            context.membership.mistrust(peer, stalled=isinstance(error, DeadlineError))
        except IntegrityError as error:
            logger.warning("peer %s sent an anchor that does not count: %s", peer[-8:], error)
            context.membership.mistrust(peer)
        except OSError as error:
            logger.error("cannot keep an anchor: %s", error)
