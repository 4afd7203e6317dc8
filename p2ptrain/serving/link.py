"""`StageLink`: a caller's hold on the next stage of a session, with failover.

The client holds the first stage by a link, and each host the stage after its own. A host that is lost, silent or
refuses is replaced by the next candidate. The substitute says which rows it has; the link sends the others again from
the caller's journal. A false alarm costs work only, because equal rows have equal bits on every host.

A second candidate is the host's shadow: it gets the same rows, a full page at a time, and computes them when it has
nothing else to do. So a failover repeats a page of rows, not the whole session.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from p2ptrain.errors import DeadlineError, PeerBusyError, PeerError, ProtocolError, TemporaryError
from p2ptrain.models.exact import PAGE
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.serving.journal import Journal
from p2ptrain.serving.messages import (
    CLOCK_SECONDS,
    MAX_CHUNK_ROWS,
    Beat,
    Cause,
    Close,
    Failed,
    FromHost,
    Moved,
    Open,
    Opened,
    Step,
    Ticket,
    service,
)
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)

OPEN_SECONDS = 5.0
"""Timeout of the only candidate's first answer."""
IMPATIENT_OPEN_SECONDS, QUICK_OPEN_SECONDS, OPEN_DIALS = 1.5, 0.5, 4.0
"""Timeout while there are others; on the first try of a substitute that was dialled before; in multiples of the time to
dial it, if that is longer."""
DIRECT_BYTES = 1 << 30
QUIET_SECONDS = 0.75
"""Timeout between messages of a host; > the keepalive interval `p2ptrain.serving.host.session.BEAT_SECONDS`."""
QUIET_BEATS = 4.0
"""The same in multiples of the host's usual interval, for slow links and busy machines."""
LONGEST_QUIET_SECONDS = 5.0
PROGRESS_SECONDS, LEAST_PROGRESS_SECONDS = 30.0, 10.0
"""Timeout of a host's first rows; least timeout of later ones."""
PROGRESS_STEPS = 8.0
"""Timeout of later rows, in multiples of the longest time that this host took so far."""
CLOSE_SECONDS = 2.0
"""Timeout of a host's end after `Close`."""
RETRY_SECONDS = 0.2
"""Pause before a candidate is tried again."""
SHADOW_RETRY_SECONDS = 10.0
"""Pause before a candidate that failed as a shadow is tried again."""
WINDOW_ROWS = 4 * MAX_CHUNK_ROWS
"""Rows on their way to a host that it has not computed yet, at most."""
MAX_TRIES = 2
"""Failures of a candidate without progress, after which it is not tried again."""


class StageFailedError(TemporaryError):
    """No candidate of a stage serves the session. The message names the stage and the candidates' reasons."""

    def __init__(self, stage: int, cause: Cause, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(f"stage {stage}: {reason}")
        self.failed = Failed(stage, cause, reason[:256], retry_after)


@dataclass
class _Supply:
    """One opened channel; the host there has computed the rows before ``position``.

    The rows before ``sent`` were sent, up to the first ``trims`` of the journal's trims. Since ``since`` the host has
    had rows to compute, and computed none; ``longest`` is the longest such time that ended. ``is_fed`` is True while
    the last stage's host feeds it the tokens; ``seen`` of them were known here at its last keepalive.
    """

    position: int
    is_shadow: bool
    sent: int
    trims: int
    since: float
    longest: float = 0.0
    is_fed: bool = False
    seen: int = 1

    def note_fed(self, fed: int, known: int) -> None:
        """Note the end of the tokens that the host was fed, which nobody needs to send, and of those known here."""
        self.is_fed, self.seen = fed >= self.seen, known
        if self.is_fed:
            self.sent = max(self.sent, min(fed, known))

    def advance(self, position: int, now: float) -> None:
        """Note what the host has computed; raise `DeadlineError` if it has had rows to compute for too long."""
        if position > self.position or self.sent <= position:
            if position > self.position:
                self.longest = max(self.longest, now - self.since)
            self.position, self.since = max(position, self.position), now
        usual = max(LEAST_PROGRESS_SECONDS, PROGRESS_STEPS * self.longest) if self.longest else PROGRESS_SECONDS
        if now - self.since > usual and not self.is_shadow:
            raise DeadlineError(f"it computed no row for {usual:.0f} s")


class StageLink:
    """Sends a session's rows to a host of one stage, and replaces the host when it fails.

    Attributes:
        stage: The stage's number.
        host: The present host, or the first to ask; empty if there was none.
        position: Rows that the host has computed.
    """

    def __init__(
        self,
        rpc: Rpc,
        stage: int,
        journal: Journal,
        on_moved: Callable[[int, str], None],
    ) -> None:
        """``on_moved`` is called with the stage and host of each new host of this stage and of later ones."""
        self._rpc = rpc
        self.stage = stage
        self._journal = journal
        self._on_moved = on_moved
        self._openings = 0
        self._before = self._shadow = ""
        self._is_closing = False
        self.host = ""
        self.position = 0

    async def run(self, ticket: Ticket, epoch: tuple[int, ...], feed: str) -> None:
        """Supply a host until `close`; the ticket's route has the candidates.

        Args:
            epoch: Of this caller; empty for the client.
            feed: The first stage's host; empty if that is the host of this stage.

        Raises:
            StageFailedError: No candidate is left, or a later stage has none.
        """

        def open_at(host: str, is_shadow: bool) -> Open:
            self._openings += 1
            return Open(ticket, (*epoch, self._openings), feed or host, is_shadow)

        candidates = [host for host in ticket.route[self.stage] if host != self._rpc.peer_id]
        self._before, self.host = self.host, ""  # No shadow is opened before it.
        async with Tasks() as tasks:
            shadowing = tasks.start(self._keep_shadow(candidates, open_at), "shadow")
            await self._keep_host(candidates, open_at, ticket)
            await asyncio.wait({shadowing}, timeout=CLOSE_SECONDS)

    async def _keep_host(self, candidates: Sequence[str], open_at: Callable[[str, bool], Open], ticket: Ticket) -> None:
        failures: dict[str, StageFailedError | str] = {}
        tries: Counter[str] = Counter()
        best = -1
        while not self._is_closing:
            able = [host for host in candidates if tries[host] < MAX_TRIES]
            if not able:
                raise self._conclude(failures)
            last = self.host or self._before
            host = min(able, key=lambda each: (tries[each], each != last, each != self._shadow))
            if tries[host]:
                await asyncio.sleep(RETRY_SECONDS)
            tries[host] += 1
            patience = OPEN_SECONDS if len(able) == 1 else self._first_patience(host, is_first=tries[host] == 1)
            try:
                await self._supply(host, open_at(host, False), patience)
                return
            except StageFailedError as error:
                if error.failed.stage != self.stage or self._is_over(error.failed.cause, ticket):
                    raise
                failures[host] = error
                tries[host] += MAX_TRIES * (error.failed.cause is not Cause.BROKEN)
            except (PeerError, DeadlineError) as error:
                failures[host] = str(error)
            if self.position > best:
                best = self.position
                tries = Counter({host: tries[host]})
            logger.info("stage %d: host %s fails a session: %s", self.stage, host[-8:], failures[host])

    def _is_over(self, cause: Cause, ticket: Ticket) -> bool:
        """True if a host's reason to end the session is right, so that no other one would serve it for long."""
        if cause is Cause.LIFETIME:
            return ticket.expires <= self._rpc.runtime.now() + CLOCK_SECONDS
        return cause is Cause.STALLED and self.position >= self._journal.end

    def _first_patience(self, host: str, *, is_first: bool) -> float:
        """Return the timeout of a host's first answer while there is another candidate.

        A substitute's first try is short, because several hosts may have stopped at once; its second one is for hosts
        that are slow.
        """
        dial = self._rpc.dial_seconds.get(host)
        is_quick = is_first and dial is not None and bool(self.host or self._before)
        least = QUICK_OPEN_SECONDS if is_quick else IMPATIENT_OPEN_SECONDS
        return min(OPEN_SECONDS, max(least, OPEN_DIALS * (dial or 0.0)))

    async def _keep_shadow(self, candidates: Sequence[str], open_at: Callable[[str, bool], Open]) -> None:
        """Keep a shadow supplied while there is a host, and another candidate."""
        loop = asyncio.get_running_loop()
        retry_at: dict[str, float] = {}
        while not self._is_closing:
            changed, now = self._journal.changed, loop.time()
            others = [host for host in candidates if host != self.host and retry_at.get(host, now) <= now]
            if self.host and others:
                self._shadow = others[0]
                try:
                    await self._supply(others[0], open_at(others[0], True), OPEN_SECONDS)
                except (StageFailedError, PeerError, DeadlineError) as error:
                    retry_at[others[0]] = loop.time() + SHADOW_RETRY_SECONDS
                    logger.debug("stage %d: no shadow at %s: %s", self.stage, others[0][-8:], error)
                self._shadow = ""
            else:
                await changed.wait()

    def close(self) -> None:
        """Tell the host that the session is over, and end `run`."""
        self._is_closing = True
        self._journal.tell()

    def _conclude(self, failures: dict[str, StageFailedError | str]) -> StageFailedError:
        said = [error.failed for error in failures.values() if isinstance(error, StageFailedError)]
        reason = "; ".join(f"{host[-8:]}: {error}" for host, error in failures.items()) or "it has no host"
        if said and len(said) == len(failures) and all(each.cause is Cause.FULL for each in said):
            return StageFailedError(self.stage, Cause.FULL, reason, min(each.retry_after for each in said))
        return StageFailedError(self.stage, Cause.NO_HOST, reason)

    def _open(self, host: str, request: Open, seconds: float) -> AbstractAsyncContextManager[Channel]:
        # Decoding is many small messages: a direct connection spares both daemons' time.
        expected_bytes = DIRECT_BYTES if self._journal.row_bytes else 0
        return self._rpc.open(host, service(self.stage), request, seconds, expected_bytes=expected_bytes)

    async def _supply(self, host: str, request: Open, patience: float) -> None:
        """Open the session at a host or shadow, and send it rows until `close`."""
        async with self._open(host, request, patience) as channel, Tasks() as tasks:
            cached = await self._opened(channel, patience)
            start = min(cached, self._journal.known)  # The host may know that later rows here are wrong drafts.
            now = asyncio.get_running_loop().time()
            supply = _Supply(start, request.is_shadow, start, len(self._journal.trims), now)
            if not request.is_shadow:
                self.host, self.position = host, supply.position
                self._on_moved(self.stage, host)
                self._journal.tell()
            hearing = tasks.call(self._hear(channel, supply), "hear")
            sending = tasks.call(self._send(channel, supply), "send")
            await asyncio.wait({hearing, sending}, return_when=asyncio.FIRST_COMPLETED)
            await (hearing if hearing.done() else sending)
            await asyncio.wait({hearing}, timeout=CLOSE_SECONDS)  # The host ends the channel.

    async def _opened(self, channel: Channel, seconds: float) -> int:
        """Return the position up to which a host has rows; raise `StageFailedError` if it declines."""
        try:
            message = await channel.receive(FromHost, seconds)
        except PeerBusyError as busy:
            raise StageFailedError(self.stage, Cause.FULL, busy.reason, RETRY_SECONDS) from busy
        match message:
            case Opened(cached):
                return cached
            case Failed() as failed:
                raise _error(failed)
            case other:
                raise ProtocolError(channel.remote, f"a {type(other).__name__} before its answer")

    async def _send(self, channel: Channel, supply: _Supply) -> None:
        """Send rows as they come, within the window, and `Close` at the end. A shadow gets no drafts."""
        journal = self._journal
        while not self._is_closing:
            changed = journal.changed
            supply.sent = first = min(supply.sent, *journal.trims[supply.trims :], journal.end)
            supply.trims = len(journal.trims)
            end = journal.known // PAGE * PAGE if supply.is_shadow else journal.end
            stop = min(end, first + MAX_CHUNK_ROWS, supply.position + WINDOW_ROWS)
            if stop <= first or (supply.is_fed and journal.end == journal.known):
                await changed.wait()
                continue
            step = Step(first, tuple(journal.ids[first:stop]), max(0, stop - journal.known), journal.together)
            rows = journal.rows(first, stop)  # Before the first pause: a trim may follow.
            supply.sent = stop
            await channel.send(step, rows)
        await channel.send(Close())

    async def _hear(self, channel: Channel, supply: _Supply) -> None:
        """Follow a host's messages; raise when it fails or falls silent."""
        loop = asyncio.get_running_loop()
        usual, heard = 0.0, loop.time()
        while True:
            message = await channel.receive(
                FromHost, min(max(QUIET_SECONDS, QUIET_BEATS * usual), LONGEST_QUIET_SECONDS)
            )
            now = loop.time()
            usual, heard = max(now - heard, 0.9 * usual), now
            match message:
                case Beat(position, fed):
                    supply.note_fed(fed, self._journal.known)
                    supply.advance(min(position, self._journal.end), now)
                    if not supply.is_shadow:
                        self.position = supply.position
                    self._journal.tell()
                case Moved(stage, moved) if stage > self.stage:
                    self._on_moved(stage, moved)
                case Failed() as failed:
                    raise _error(failed)


def _error(failed: Failed) -> StageFailedError:
    return StageFailedError(failed.stage, failed.cause, failed.reason, failed.retry_after)
