"""Exchange of anchors: peers ask the anchor keys when one is due, and others that are on another lineage."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Annotated

from msgspec import Meta

from p2ptrain.averaging.commit.round_log import MAX_CERTIFICATES, RoundLog
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.protocol.anchors import Anchor
from p2ptrain.averaging.protocol.certificate import MAX_ROOT_BYTES, Head, fetch_certificates
from p2ptrain.errors import DeadlineError, IntegrityError, PeerError, PeerRefusedError, ProtocolError
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.network.schema import Message
from p2ptrain.tasks import Tasks, together

logger = logging.getLogger(__name__)

ANCHORS = "anchors"
CALL_SECONDS = 5.0
NEWCOMER_SECONDS = 3.0
"""A newcomer waits so long for anchors before it follows anybody."""
MAX_ASKED = 3
MAX_HELD = 3


class AskAnchors(Message, frozen=True):
    """Request for the receiver's anchors, but for the one that the sender knows; ``known`` is its lineage."""

    known: Annotated[bytes, Meta(max_length=32)] = b""


class HeldAnchors(Message, frozen=True):
    """Reply with `AnchorBook.held`."""

    anchors: Annotated[tuple[Anchor, ...], Meta(max_length=MAX_HELD)]


def serve_anchors(context: PeerContext) -> None:
    """Answer requests for anchors from now on."""

    async def answer(peer: str, request: AskAnchors) -> HeldAnchors:
        return HeldAnchors(context.anchors.held(request.known))

    if context.anchors.keys:
        context.rpc.serve(ANCHORS, AskAnchors, answer)


class AnchorSearch:
    """Asks other peers for anchors that this one should know; does nothing in a swarm without anchor keys."""

    def __init__(self, context: PeerContext, round_log: RoundLog, own: Callable[[], Head], tasks: Tasks) -> None:
        """``own`` returns the head of this peer's state."""
        self._context, self._log, self._own, self._tasks = context, round_log, own, tasks
        self._book = context.anchors
        self._asked: dict[str, int] = {}
        self._keys_asked_at = -1
        self._running: asyncio.Task[None] | None = None
        self._holders: set[str] = set()  # of the newest anchor

    async def look(self) -> None:
        """Ask for anchors in the background; only a newcomer waits for the answers, a short time."""
        if not self._book.keys or self._book.conflict:
            return
        if self._running is None or self._running.done():
            if not (peers := self._whom_to_ask(self._own())):
                return
            self._running = self._tasks.start(self._ask(peers), "anchors")
        if self._own().round == 0:
            await asyncio.wait([self._running], timeout=NEWCOMER_SECONDS)

    def better(self, records: Sequence[PeerRecord]) -> list[PeerRecord]:
        """Return the records of peers to follow whatever their rank: they showed an anchor that this peer's lacks."""
        if not self._book.is_off:
            return []
        lineage = self._own().lineage
        return [record for record in records if record.peer in self._holders and record.lineage != lineage]

    def _whom_to_ask(self, own: Head) -> list[str]:
        """Return the keys once a round while an anchor is due, and peers on lineages that this one does not know.

        Each of those is asked once for each anchor that it may have.
        """
        book, membership = self._book, self._context.membership
        known = self._log.lineages() | {own.lineage}
        others = [r for r in membership.trusted_records() if r.round >= book.every and r.lineage not in known]
        seen = max([own.round, *(r.round for r in others if own.round == 0)]) - 1
        is_due = seen // book.every * book.every > book.round and self._keys_asked_at != own.round
        keys = [key for key in sorted(book.keys) if is_due and membership.may_answer(key)]
        self._keys_asked_at = own.round if keys else self._keys_asked_at
        wanted = {r.peer: r.round // book.every for r in others if r.peer not in keys}
        asked = [peer for peer, number in wanted.items() if book.is_off or self._asked.get(peer) != number][:MAX_ASKED]
        self._asked = {peer: number for peer, number in self._asked.items() if peer in wanted}
        self._asked.update((peer, wanted[peer]) for peer in asked)
        return keys + asked

    async def _ask(self, peers: list[str]) -> None:
        await together("anchor", map(self._ask_one, peers))

    async def _ask_one(self, peer: str) -> None:
        context, newest = self._context, self._book.newest
        known = b"" if newest is None or self._book.is_off else newest.lineage
        try:
            if peer == context.rpc.peer_id:
                anchors = self._book.held(known)
            else:
                request, most = AskAnchors(known), MAX_ROOT_BYTES
                reply = await context.rpc.call(peer, ANCHORS, request, HeldAnchors, CALL_SECONDS, max_reply_bytes=most)
                anchors = reply.anchors
            for anchor in anchors:
                await self._take(peer, anchor)
        except (IntegrityError, ProtocolError) as error:
            logger.warning("peer %s sent an anchor that does not count: %s", peer[-8:], error)
            context.membership.mistrust(peer)
        except (PeerError, DeadlineError) as error:
            logger.debug("peer %s tells no anchor: %s", peer[-8:], error)
            if not isinstance(error, PeerRefusedError):
                self._asked.pop(peer, None)

    async def _take(self, source: str, anchor: Anchor) -> None:
        """Adopt an anchor that a peer showed, or stop if it contradicts the newest one; ignore an older one.

        One of a round that this peer's log contains must follow from a head there, and so must one of a round so near
        that the source has the certificates. Of any other the keys' signatures decide.

        Raises:
            IntegrityError: It is no anchor of this swarm, or no certificates lead to it.
            PeerError, DeadlineError: The source does not tell what leads to it.
        """
        book, context, log = self._book, self._context, self._log
        complete = await context.runtime.offload(book.check, anchor)
        if complete is None:
            return
        head, newest, own = complete.head, book.newest, self._own()
        is_later, held = head.round > book.round, log.lineage_at(own, head.round)
        if newest is not None and head.lineage == newest.lineage:
            self._holders.add(source)
        elif held == head.lineage:
            if is_later:
                self._adopt(source, complete, is_off=False)
        elif is_later or held is not None:
            heads = [own, *log.heads(), *([newest] if newest is not None else [])]
            past = {each.lineage for each in heads if newest is None or each is newest or book.is_past(each)}
            starts = {each.lineage: each.table for each in heads}
            chain = await fetch_certificates(
                context.rpc, source, starts, context.any_certificate, proofs=True, until=head.lineage
            )
            is_proved = any(each.body.next_lineage == head.lineage for each in chain)
            if is_proved and is_later and not past.isdisjoint(each.body.lineage for each in chain):
                is_off = log.lineage_at(self._own(), head.round) not in (None, head.lineage)
                self._adopt(source, complete, is_off=is_off)
            elif is_proved and newest is not None:
                book.contradict(complete)
            elif held is not None or 0 < own.round < head.round <= own.round + MAX_CERTIFICATES:
                raise IntegrityError("no certificates lead to it")
            else:
                is_off = own.round >= head.round and not await log.leads_to(source, own, head)
                self._adopt(source, complete, is_off=is_off)

    def _adopt(self, source: str, anchor: Anchor, *, is_off: bool) -> None:
        self._holders = {source}
        self._book.adopt(anchor, is_off=is_off)
