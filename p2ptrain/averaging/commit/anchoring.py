"""Exchange of anchors: peers ask the anchor keys when one is due, and others that are on another lineage."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

from msgspec import Meta

from p2ptrain.averaging.commit.round_log import RoundLog
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.protocol.anchors import Anchor, follows
from p2ptrain.averaging.protocol.certificate import MAX_ROOT_BYTES, Head, fetch_certificates
from p2ptrain.errors import DeadlineError, IntegrityError, PeerError, PeerRefusedError, ProtocolError
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.network.schema import Message
from p2ptrain.tasks import Tasks, together

logger = logging.getLogger(__name__)

ANCHORS = "anchors"
CALL_SECONDS = 5.0
ASK_SECONDS = 60.0
"""Timeout of a search; > that of a chain of certificates."""
NEWCOMER_SECONDS = 3.0
"""A newcomer, or a peer that was away for an anchor, waits so long for anchors before it follows anybody."""
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

    def __init__(
        self,
        context: PeerContext,
        round_log: RoundLog,
        own: Callable[[], Head],
        tasks: Tasks,
        is_stalled: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            own: Returns the head of this peer's state.
            is_stalled: Tells whether no full round was possible for long.
        """
        self._context, self._log, self._own, self._tasks = context, round_log, own, tasks
        self._is_stalled = is_stalled
        self._book = context.anchors
        self._asked: dict[str, int] = {}
        self._keys_asked_at = -1
        self._has_looked = False
        self._running: asyncio.Task[None] | None = None
        self._holders: set[str] = set()  # of the newest anchor

    async def look(self) -> None:
        """Ask for anchors in the background; wait a short time for the answers if this peer follows others far."""
        if not self._book.keys or self._book.conflict:
            return
        own, records = self._own(), self._context.membership.trusted_records()
        if not self._has_looked and 0 < own.round < self._book.round:
            self._book.forget()
        self._has_looked = True
        self._holders.intersection_update(record.peer for record in records)
        # Full rounds alone: a peer that announces more, and does not show them when it is followed, is not trusted.
        others = [r for r in self._unknown(records) if r.lineage_full >= self._book.every]
        far = [r.lineage_full for r in others if r.lineage_full - own.full >= self._book.every]
        if self._running is None or self._running.done():
            if not (peers := self._whom_to_ask(own, records, others, max([own.round, *far]))):
                return
            self._running = self._tasks.start(self._ask(peers), "anchors")
        if far:
            await asyncio.wait([self._running], timeout=NEWCOMER_SECONDS)

    def _unknown(self, records: Sequence[PeerRecord]) -> list[PeerRecord]:
        """Return the records that announce no head of this peer's lineage that it knows."""
        known = self._log.lineages() | {self._own().lineage}
        return [record for record in records if record.lineage not in known]

    def better(self, records: Sequence[PeerRecord]) -> list[PeerRecord]:
        """Return the records of peers to follow whatever their rank: they showed an anchor that this peer's lacks."""
        if not self._book.is_off:
            return []
        return [record for record in self._unknown(records) if record.peer in self._holders]

    def _whom_to_ask(
        self, own: Head, records: Sequence[PeerRecord], others: Sequence[PeerRecord], newest: int
    ) -> list[str]:
        """Return the keys and some peers once a round while an anchor is due, and some of ``others``.

        Each of those is asked once for each anchor that it may have.
        """
        book, membership, due = self._book, self._context.membership, list[str]()
        if (newest - 1) // book.every * book.every > book.round and self._keys_asked_at != own.round:
            self._keys_asked_at = own.round
            due = [key for key in sorted(book.keys) if membership.may_answer(key)]
            due += self._some([record.peer for record in records])
        wanted = {r.peer: r.lineage_full // book.every for r in others}
        self._asked = {peer: number for peer, number in self._asked.items() if peer in wanted}
        asked = self._some([p for p, number in wanted.items() if book.is_off or self._asked.get(p) != number])
        self._asked.update((peer, wanted[peer]) for peer in asked)
        return list(dict.fromkeys(due + asked))

    def _some(self, peers: Sequence[str]) -> list[str]:
        """Return `MAX_ASKED` of these peers at random: strangers choose their ids, and so their place in any order."""
        return self._context.runtime.random.sample(peers, min(len(peers), MAX_ASKED))

    async def _ask(self, peers: list[str]) -> None:
        try:
            async with asyncio.timeout(ASK_SECONDS):
                await together("anchor", map(self._ask_one, peers))
        except TimeoutError:
            logger.debug("no anchor came within %g s", ASK_SECONDS)

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
                self._ask_again(peer)

    async def _take(self, source: str, anchor: Anchor) -> None:
        """Adopt an anchor that a peer showed, or stop if it contradicts the newest one; ignore an older one.

        It counts if certificates lead to it from a head that this peer knows. Of one that this peer's log does not
        tell of, the keys' signatures decide, for a newcomer and for a peer that is past it, or was away. A peer that is
        not stalled was not away.

        Raises:
            IntegrityError: It is no anchor of this swarm.
            PeerError, DeadlineError: The source does not tell what leads to it.
        """
        book, log = self._book, self._log
        if (complete := await self._context.runtime.offload(book.check, anchor)) is None:
            return
        head, newest, own = complete.head, book.newest, self._own()
        here = log.lineage_at(own, head.round)
        if newest is not None and head.lineage == newest.lineage:
            self._holders.add(source)
            return
        if newest is not None and head.round < newest.round and (here in (None, head.lineage) or not book.is_past(own)):
            return  # Nothing that this peer holds tells whether the newest one follows from it.
        if own.round == 0 and newest is None:
            return self._adopt(source, complete)
        path = await self._path_to(source, head, own)
        is_unseen = not path and here is None and head.round > book.round  # by this peer's log
        is_off = is_unseen and own.round >= head.round and not await self._comes_after(source, head, own)
        if book.newest is not newest or own.lineage not in log.lineages() | {self._own().lineage}:
            return await self._take(source, anchor)  # Another source was faster, or this peer moved.
        if (path and self._is_after_newest(path)) or (is_unseen and own.round >= head.round):
            self._adopt(source, complete, is_off=is_off)
        elif path or (newest is not None and head.round == newest.round and own.round == 0):
            book.contradict(complete)
        elif is_unseen and (own.round == 0 or self._is_stalled()):
            self._adopt(source, complete)
        else:  # Later it may count.
            self._ask_again(source)

    def _ask_again(self, peer: str) -> None:
        self._asked.pop(peer, None)
        if peer in self._book.keys:
            self._keys_asked_at = -1

    def _is_after_newest(self, path: Mapping[int, bytes]) -> bool:
        """Return False if the end of a path and the newest anchor exclude each other.

        If neither the path nor this peer's log tells, the keys' word counts: they sign no head that excludes an anchor.
        """
        newest, own = self._book.newest, self._own()
        if newest is None or (is_after := follows(newest, path)):
            return True
        here = self._log.lineage_at(own, newest.round)
        return is_after is None and (self._book.is_past(own) or here in (None, newest.lineage))

    async def _path_to(self, source: str, head: Head, own: Head) -> dict[int, bytes]:
        """Return lineages by round from a head that this peer knows to an anchor's; empty if nobody shows such a path.

        A seed has no certificates: then others are asked.
        """
        if self._log.lineage_at(own, head.round) == head.lineage:
            return {head.round: head.lineage}
        heads = [own, *self._log.heads(), *([] if self._book.newest is None else [self._book.newest])]
        try:
            if source != self._context.rpc.peer_id:
                return await self._path(source, head, heads)
        except PeerRefusedError as error:
            logger.debug("peer %s has no certificates: %s", source[-8:], error)
        for peer in self._some([r.peer for r in self._context.membership.trusted_records() if r.peer != source]):
            try:
                if path := await self._path(peer, head, heads):
                    return path
            except (PeerError, DeadlineError) as error:
                logger.debug("peer %s tells no certificates: %s", peer[-8:], error)
        return {}

    async def _path(self, peer: str, head: Head, starts: Sequence[Head]) -> dict[int, bytes]:
        context, tables = self._context, {each.lineage: each.table for each in starts}
        chain = await fetch_certificates(
            context.rpc, peer, tables, context.any_certificate, proofs=True, until=head.lineage
        )
        if not any(each.body.next_lineage == head.lineage for each in chain):
            return {}
        return {each.body.round: each.body.lineage for each in chain if each.body.round < head.round} | {
            head.round: head.lineage
        }

    async def _comes_after(self, source: str, head: Head, own: Head) -> bool:
        """True if a peer has the certificates from an anchor's head to this peer's own.

        The source may withhold them, so that this peer leaves its lineage; so others are asked, too.
        """
        for peer in [source, *self._some([r.peer for r in self._context.membership.trusted_records()])]:
            try:
                if await self._log.leads_to(peer, own, head):
                    return True
            except (PeerError, DeadlineError) as error:
                logger.debug("peer %s tells no certificates: %s", peer[-8:], error)
        return False

    def _adopt(self, source: str, anchor: Anchor, *, is_off: bool = False) -> None:
        """Adopt an anchor; this peer's lineage lacks it if its log says so, or ``is_off``."""
        here = self._log.lineage_at(self._own(), anchor.head.round)
        self._holders = {source}
        self._book.adopt(anchor, is_off=is_off or here not in (None, anchor.head.lineage))
