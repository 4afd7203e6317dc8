"""`ServingHost`: takes sessions on one stage, and links each to the next stage."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import torch

from p2ptrain.errors import PeerRefusedError, ProtocolError
from p2ptrain.models.exact import ExactStage
from p2ptrain.network.records.serving import MAX_STEP_SECONDS, ServedStage, ServingReport
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.serving.host.session import BEAT_SECONDS, HostSession, Key
from p2ptrain.serving.host.sessions import DeclinedError, SessionBook
from p2ptrain.serving.host.share import ComputeShare
from p2ptrain.serving.host.tokens import TokenService
from p2ptrain.serving.link import StageFailedError, StageLink
from p2ptrain.serving.messages import (
    IDLE_SECONDS,
    MAX_OPEN_BYTES,
    Beat,
    Cause,
    Close,
    Failed,
    FromCaller,
    Open,
    Opened,
    Step,
    service,
)
from p2ptrain.tasks import Tasks

STEP_SECONDS = 60.0
"""Timeout of a step's hidden states."""
KEPT_VERSIONS = 2
BEAT_ROWS = 64
"""Computed rows that a caller is told at once; < `p2ptrain.serving.link.WINDOW_ROWS`."""


class ServingHost:
    """Serves one stage from construction on, in the versions that `serve` gives it.

    Attributes:
        executor: Computes the sessions' rows.
        book: The sessions.
    """

    def __init__(
        self, rpc: Rpc, book: SessionBook, share: float = 1.0, is_training: Callable[[], bool] = lambda: False
    ) -> None:
        """``share`` bounds the time of batches while ``is_training``; see `ComputeShare`."""
        self.book, self.executor = book, book.executor
        self.executor.share = ComputeShare(share, is_training)
        self._rpc = rpc
        self._offer = offer = book.offer
        self._number = offer.number
        self._tasks = Tasks()
        self._tokens = TokenService(rpc, book)
        rpc.serve_channel(service(offer.number), Open, self._serve, max_request_bytes=MAX_OPEN_BYTES)
        self._tasks.keep(self.executor.run, f"serve-{offer.number}")
        self._tasks.keep(book.run, "sessions")

    def serve(self, key: Key, stage: ExactStage) -> None:
        """Serve a version's weights; it keeps `KEPT_VERSIONS`."""
        if self.executor.store is None:
            self.executor.store = stage.new_pages(self.book.pool.num_pages)
        self.executor.stages[key] = stage
        self.keep(KEPT_VERSIONS)

    def keep(self, number: int) -> None:
        """Drop all but the last ``number`` versions; their sessions fail."""
        while len(self.executor.stages) > number:
            del self.executor.stages[next(iter(self.executor.stages))]  # Not the least round: a stage may go back.
        self.book.drop_stale_pages()
        for session in self.book.open.values():
            if session.key not in self.executor.stages:
                session.fail(Failed(self._number, Cause.VERSION, f"round {session.key[0]} is not served any more"))

    async def close(self) -> None:
        """Stop serving; idempotent."""
        self._rpc.withdraw(service(self._number))
        await self._tokens.close()
        await self.book.close()
        await self._tasks.close()

    @property
    def keys(self) -> list[Key]:
        """The served versions."""
        return sorted(self.executor.stages)

    def report(self) -> ServingReport:
        """Return this host's part of its peer's record."""
        offer, sessions, pool, costs = self._offer, len(self.book.open), self.book.pool, self.executor.costs
        served = ServedStage(
            offer.number, offer.num_stages, tuple(self.keys), offer.arithmetic, offer.context, pool.num_free,
            sessions, offer.grammars.engine if offer.grammars is not None else "", pool.num_pages,
            min(costs.base, MAX_STEP_SECONDS), min(costs.row or 0.0, MAX_STEP_SECONDS),
        )  # fmt: skip
        answers = sum(not each.is_shadow for each in self.book.open.values())
        return ServingReport(answers if offer.is_last else 0, self.book.meter.totals(), served)

    async def _serve(self, channel: Channel, request: Open) -> None:
        """Serve one caller of a session until it closes the session, is lost, or is superseded."""
        try:
            session = await self.book.admit(request, channel.remote)
        except DeclinedError as declined:
            await channel.close(declined.failed)
            return
        session.attach(channel, request)
        if self._offer.is_last:
            self._start_feeding(session, request)
        elif not request.is_shadow:
            self._link(session, request)
        try:
            await channel.send(Opened(session.known))
            async with Tasks() as tasks:
                telling = tasks.call(self._tell(session, channel), "tell")
                hearing = tasks.call(self._hear(session, channel), "hear")
                await asyncio.wait({telling, hearing}, return_when=asyncio.FIRST_COMPLETED)
                await (hearing if hearing.done() else telling)
        finally:
            if session.channel is channel:
                session.channel = None
                self.book.leave(session)

    def _start_feeding(self, session: HostSession, request: Open) -> None:
        session.feed = session.feed or request.feed
        if not session.ends:
            self._tokens.start_feeding(session)

    async def _hear(self, session: HostSession, channel: Channel) -> None:
        """Take a caller's rows until it closes the session."""
        while True:
            match await channel.receive(FromCaller, IDLE_SECONDS):
                case Close():
                    self._check_is_present(session, channel)
                    if self.book.holds(session):
                        self.book.end(session)
                    return
                case Step(first, ids, drafts, together):
                    rows = torch.tensor(ids)
                    if self._number:
                        session.together = together
                        data = await channel.receive_bytes(len(ids) * session.wire.row_bytes, STEP_SECONDS)
                        try:
                            rows = session.wire.decode(data)
                        except ValueError as error:
                            raise ProtocolError(channel.remote, str(error)) from error
                    self._check_is_present(session, channel)
                    session.put(first, ids, rows, drafts)
                    if drafts and session.speculation is not None:
                        session.speculation.leave_to_client(drafts)
                    session.put_fed({})
                    self.executor.wake()

    def _check_is_present(self, session: HostSession, channel: Channel) -> None:
        """Raise `PeerRefusedError` if a newer caller has superseded this one."""
        if session.channel is not channel:
            raise PeerRefusedError(self._rpc.peer_id, "a newer caller has the session")

    async def _tell(self, session: HostSession, channel: Channel) -> None:
        """Send a caller keepalives and news until the session fails, or has no next stage."""
        told: dict[int, str] = {}
        position, beat_at, now = 0, 0.0, asyncio.get_running_loop().time
        while True:
            news = session.news
            for place in session.places():
                if told.get(place.stage) != place.host:
                    told[place.stage] = place.host
                    await channel.send(place)
            if (failure := session.failure or session.link_failure) is not None:
                await channel.send(failure)
                return
            if now() >= beat_at or session.computed - position >= BEAT_ROWS:
                position, beat_at = session.computed, now() + BEAT_SECONDS
                await channel.send(Beat(position, session.fed))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(beat_at):
                    await news.wait()

    def _link(self, session: HostSession, request: Open) -> None:
        """Link a session to the next stage, unless a link is at work whose hosts the client still wants."""
        link = StageLink(self._rpc, self._number + 1, session.journal, session.note_later)
        if session.linking is not None and not session.linking.done():
            if all(session.later.get(stage, "") in ("", *hosts) for stage, hosts in enumerate(request.ticket.route)):
                return
            session.linking.cancel()  # Without a `Close`: the hosts that stay are opened again.
            if (host := session.later.get(link.stage, "")) in request.ticket.route[link.stage]:
                link.host = host
        session.link_failure = None

        async def supply() -> None:
            try:
                await link.run(request.ticket, request.epoch, request.feed)
            except StageFailedError as error:
                session.link_failure = error.failed
                session.tell()

        session.linking = self._tasks.start(supply(), "link")
        session.ends.append(link.close)
