"""`SwarmSession`: one generation on a swarm's hosts, as the client sees it; `LogitsSession`: the logits of a prompt."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from statistics import fmean, median
from typing import Any

import msgspec
import torch

from p2ptrain.errors import DeadlineError, P2PTrainError, PeerError, ProtocolError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.serving.errors import GenerationFailedError, NoHostError, OverloadedError, VersionGoneError
from p2ptrain.serving.generation import Token
from p2ptrain.serving.journal import Journal
from p2ptrain.serving.link import (
    CLOSE_SECONDS,
    LEAST_PROGRESS_SECONDS,
    OPEN_SECONDS,
    PROGRESS_STEPS,
    StageFailedError,
    StageLink,
)
from p2ptrain.serving.messages import (
    AHEAD,
    CLOCK_SECONDS,
    FLOAT_BYTES,
    LOGITS,
    STALLED_SECONDS,
    TOKENS,
    Cause,
    DrawnToken,
    Grant,
    Listen,
    LogitRows,
    LogitsRequest,
    Ticket,
)
from p2ptrain.serving.prefix import page_hashes
from p2ptrain.tasks import Backoff, Tasks

logger = logging.getLogger(__name__)

TOKEN_SECONDS = 120.0
"""Timeout between tokens of hosts that give no sign of failure; the first one includes the prompt's computation."""
FIRST_TOKEN_SECONDS = 60.0
"""Time without a row of the first stage, before the first token, after which a client leaves the last host."""
UNREACHED_SECONDS = 60.0
"""Time after a failed dial of the last host for which its tokens come up the chain, before it is dialled again."""
WATCH_SECONDS = 1.0
"""Interval of looks at a session's progress."""
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 2.0
"""Backoff between attempts to find hosts."""
LEAST_WAVES = 8
"""Times between tokens that tell a route's pace."""


class SwarmSession:
    """A generation: it holds the tokens, so any host can be replaced.

    Attributes:
        failovers: Replaced hosts so far.
        ticket: Of the version that goes on now.
        drawn: The tokens so far.
        journal: The known tokens, and drafts of those that follow.
        version, cached: See `p2ptrain.serving.generation.Generation`.
    """

    def __init__(
        self,
        rpc: Rpc,
        ticket: Ticket,
        ids: list[int],
        plan: Callable[[Ticket, frozenset[str]], Awaitable[Ticket]],
        renew: Callable[[Ticket], Awaitable[Ticket]],
        wait_seconds: float,
    ) -> None:
        """Hosts are looked for ``wait_seconds``.

        Args:
            plan: Returns a ticket, signed, with its version's hosts as of now, less some; raises `NoHostError` or
                `VersionGoneError`.
            renew: Returns a ticket like the given one, of the newest version and another session.
        """
        self._rpc = rpc
        self._plan = plan
        self._renew = renew
        self._wait_seconds = wait_seconds
        self.failovers = 0
        self._cached: int | None = None
        self._moved = asyncio.Event()
        self.journal = Journal(ids)
        self.drawn: list[int] = []
        self._stop = ticket.prompt + ticket.max_tokens
        self._use(ticket)
        self._tokens: asyncio.Queue[Token | P2PTrainError] = asyncio.Queue()
        self._next = self._taken = ticket.prompt
        self._taken_at = asyncio.get_running_loop().time()
        self._left: frozenset[str] = frozenset()
        self._granted = asyncio.Event()
        self._due_at: float | None = None
        self._waves: list[float] = []

    def _use(self, ticket: Ticket) -> None:
        """Begin a session with a ticket."""
        version = ticket.version
        self.version = f"{version.round}-{version.digests[0].hex()[:8]}-{version.arithmetic}"
        self.ticket = ticket
        self._hosts = [""] * len(version.digests)
        self._moved.set()
        self._link = StageLink(self._rpc, 0, self.journal, self._on_moved)

    @property
    def route(self) -> tuple[str, ...]:
        return tuple(self._hosts)

    @property
    def cached(self) -> int:
        return self._cached or 0

    @property
    def pace(self) -> float | None:
        """The usual seconds of a wave; None after few. Tokens that came with the one before are of its wave."""
        if len(self._waves) < LEAST_WAVES:
            return None
        return median([each for each in self._waves if each >= fmean(self._waves) / 2])

    @property
    def _permitted(self) -> int:
        """The position up to which the last host may draw."""
        return min(self._stop, max(self._taken, self.ticket.prompt) + AHEAD)

    async def run(self) -> None:
        """Keep hosts supplied and receive tokens until cancelled; a failure is raised by the iteration."""
        try:
            async with Tasks() as tasks:
                supplying = tasks.call(self._supply(), "supply")
                listening = tasks.call(self._listen(), "listen")
                await asyncio.wait({supplying, listening}, return_when=asyncio.FIRST_COMPLETED)
                await (supplying if supplying.done() else listening)
        except P2PTrainError as error:
            self._tokens.put_nowait(error)
        except Exception as error:
            logger.exception("a generation failed")
            self._tokens.put_nowait(GenerationFailedError(f"this peer failed ({error!r}): see its log"))

    async def close(self, running: asyncio.Task[None]) -> None:
        """Tell the hosts that the session is over, and end `run`."""
        self._link.close()
        await asyncio.wait({running}, timeout=CLOSE_SECONDS)

    async def __aiter__(self) -> AsyncIterator[Token]:
        for _ in range(self._taken, self._stop):
            try:
                async with asyncio.timeout(TOKEN_SECONDS):
                    token = await self._tokens.get()
            except TimeoutError:
                raise GenerationFailedError(f"the hosts sent no token for {TOKEN_SECONDS:g} s: try again") from None
            if isinstance(token, P2PTrainError):
                raise token
            self._taken, self._taken_at = token.position + 1, asyncio.get_running_loop().time()
            self._granted.set()
            yield token
            if token.id in self.ticket.stops:
                return

    # Hosts

    def _on_moved(self, stage: int, host: str) -> None:
        if stage < len(self._hosts) and host not in (self._hosts[stage], self._rpc.peer_id):
            self.failovers += bool(self._hosts[stage])
            if not stage and self._cached is None:
                self._cached = self._link.position
            self._hosts[stage] = host
            self._moved.set()

    async def _supply(self) -> None:
        """Keep the first stage supplied, with other hosts after each failure."""
        loop = asyncio.get_running_loop()
        backoff, since, best = Backoff(PAUSE_SECONDS, LONGEST_PAUSE_SECONDS), loop.time(), -1
        while True:
            try:
                await self._supply_until_stuck()
                return
            except DeadlineError as error:
                logger.info("leaving host %s: %s", self._hosts[-1][-8:], error)
                self._left |= {self._hosts[-1]}
                continue
            except (VersionGoneError, StageFailedError, NoHostError) as error:
                if self._left:
                    self._left = frozenset()
                    if self._next > best:  # Better one of them than none, once without a token.
                        since, best = loop.time(), self._next
                        continue
                if isinstance(error, VersionGoneError) or self._is_expired(error):
                    if self._next >= self._stop:
                        return
                    logger.info("going on in another session: %s", error)
                    self.journal.trim(self._next)
                    self._use(await self._renew(self._rest()))
                elif self._is_idle(error):
                    raise GenerationFailedError("nobody takes the answer's tokens: ask again") from error
                else:
                    if self._next > best:
                        backoff.reset()
                        since, best = loop.time(), self._next
                    if loop.time() - since >= self._wait_seconds:
                        raise _explained(error) from error
                    logger.info("looking for other hosts: %s", error)
            await asyncio.sleep(backoff.next())

    async def _supply_until_stuck(self) -> None:
        """Keep the first stage supplied; raise `DeadlineError` if the last one's host draws no token that is due."""
        ticket = await self._plan(self.ticket, self._left)
        async with Tasks() as tasks:
            supplying, watching = tasks.call(self._link.run(ticket, (), ""), "link"), tasks.call(self._watch(), "watch")
            await asyncio.wait({supplying, watching}, return_when=asyncio.FIRST_COMPLETED)
            await (supplying if supplying.done() else watching)

    async def _watch(self) -> None:
        """Raise `DeadlineError` once nothing has come of the session for longer than its usual time between tokens."""
        now = asyncio.get_running_loop().time
        seen, since, longest = self._progressed(), now(), 0.0
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            progress = self._progressed()
            is_due = self._next < self._permitted and not (self.drawn and self.drawn[-1] in self.ticket.stops)
            if progress != seen or not is_due:
                longest = max(longest, now() - since) if self.drawn and is_due else longest
                seen, since = progress, now()
            patience = max(LEAST_PROGRESS_SECONDS, PROGRESS_STEPS * longest) if self.drawn else FIRST_TOKEN_SECONDS
            if now() - since > patience:
                raise DeadlineError(f"it drew no token for {patience:.0f} s")

    def _progressed(self) -> tuple[int, ...]:
        return self._next, self._link.position

    def _is_expired(self, error: StageFailedError | NoHostError) -> bool:
        """True if hosts ended the session with its ticket."""
        is_told = isinstance(error, StageFailedError) and error.failed.cause is Cause.LIFETIME
        return is_told and self.ticket.expires <= self._rpc.runtime.now() + CLOCK_SECONDS

    def _is_idle(self, error: StageFailedError | NoHostError) -> bool:
        """True if hosts ended the session because this peer's user takes no tokens."""
        idle = asyncio.get_running_loop().time() - self._taken_at if self._taken < self._next else 0.0
        is_told = isinstance(error, StageFailedError) and error.failed.cause is Cause.STALLED
        return is_told and idle >= STALLED_SECONDS / 2

    def _rest(self) -> Ticket:
        """Return a ticket for the tokens that are left."""
        pages = page_hashes(self.journal.ids[: self._next])
        max_tokens = self._stop - self._next
        return msgspec.structs.replace(self.ticket, prompt=self._next, max_tokens=max_tokens, pages=pages)

    # Tokens

    async def _listen(self) -> None:
        """Receive the tokens from the last stage's present host."""
        backoff = Backoff(PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
        while True:
            self._moved.clear()
            if host := self._hosts[-1]:
                before = self._next
                try:
                    await self._listen_to(host)
                except (PeerError, DeadlineError) as error:
                    logger.debug("no tokens from host %s: %s", host[-8:], error)
                if self._next > before:
                    backoff.reset()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff.next() if host else None):
                    await self._moved.wait()

    async def _listen_to(self, host: str) -> None:
        """Receive one host's tokens until it is lost or replaced."""
        request = Listen(self.ticket.session, self._next, self._taken + AHEAD, self._hosts[0])
        async with self._open(host, TOKENS, request) as channel:
            granting = self._grant(channel, self._taken + AHEAD, self._hosts[0])
            await self._follow(host, channel, self._receive(host, request.session, channel), granting)

    def _open(self, host: str, name: str, request: object) -> AbstractAsyncContextManager[Channel]:
        """Open a channel to the last host; to the first, whose chain relays it, if the last one cannot be dialled."""
        now = asyncio.get_running_loop().time()
        is_relayed = now - self._rpc.unreached_at.get(host, -math.inf) < UNREACHED_SECONDS
        return self._rpc.open(self._hosts[0] if is_relayed else host, name, request, OPEN_SECONDS)

    async def _follow(self, host: str, channel: Channel, *work: Coroutine[Any, Any, None]) -> None:
        """Run work on a host's channel until some of it ends, or the host or the channel's other end is replaced."""
        async with Tasks() as tasks:
            working = [tasks.call(each, "follow") for each in work]
            replaced = tasks.call(self._until_replaced(host, channel.remote, self.ticket.session), "replaced")
            await asyncio.wait({*working, replaced}, return_when=asyncio.FIRST_COMPLETED)
            for each in working:
                if each.done():
                    await each
            if replaced.done():  # A stopped host acknowledges no end.
                channel.abort()

    async def _receive(self, host: str, session: bytes, channel: Channel) -> None:
        while True:
            token = await channel.receive(DrawnToken, TOKEN_SECONDS)
            if self.ticket.session != session:
                return
            self._take(host, token)

    async def _until_replaced(self, host: str, remote: str, session: bytes) -> None:
        while self._hosts[-1] == host and remote in self._hosts and self.ticket.session == session:
            self._moved.clear()
            await self._moved.wait()

    def _take(self, host: str, token: DrawnToken) -> None:
        journal = self.journal
        if token.position > self._next:
            raise ProtocolError(host, f"token {token.position}, and {self._next} is missing")
        if token.position < self._next:
            if token.position < journal.end and journal.ids[token.position] != token.id:
                raise ProtocolError(host, f"another token {token.position} than before")
            return
        if token.position >= self._permitted:
            raise ProtocolError(host, f"token {token.position}, which was not granted")
        self._next += 1
        now = asyncio.get_running_loop().time()
        self._waves += [] if self._due_at is None else [now - self._due_at]
        self._due_at = now if self._next < self._permitted else None
        self.drawn.append(token.id)
        if token.position < journal.end and journal.ids[token.position] == token.id:
            journal.append([], known=self._next)  # A draft was right.
        elif self._next < self._stop:
            journal.trim(token.position)
            journal.append([token.id])
        self._tokens.put_nowait(Token(token.position, token.id, token.logprob, token.top))

    async def _grant(self, channel: Channel, granted: int, feed: str) -> None:
        """Tell the last host how many tokens this peer's user has taken, and the first stage's host."""
        while True:
            self._granted.clear()
            if (self._taken + AHEAD, self._hosts[0]) != (granted, feed):
                granted, feed = self._taken + AHEAD, self._hosts[0]
                await channel.send(Grant(granted, feed))
            await self._granted.wait()


class LogitsSession(SwarmSession):
    """A session for the logits of its prompt's rows, perhaps with their last hidden states; no token is taken."""

    def __init__(self, *arguments: Any) -> None:
        self._progress = asyncio.Event()
        super().__init__(*arguments)

    def _use(self, ticket: Ticket) -> None:
        super()._use(ticket)
        self._rows: list[torch.Tensor] = []  # Of one version.

    async def run(self) -> None:
        """Receive logits until cancelled; `logits` raises a failure."""
        await super().run()
        self._progress.set()

    async def logits(self, vocabulary: int, hidden: int = 0) -> torch.Tensor:
        """Return ``[prompt, vocabulary + hidden]``, fp32; ``hidden`` is 0 without the states.

        Raises `GenerationFailedError` if hosts send nothing for `TOKEN_SECONDS`, and as the iteration.
        """
        self._width, self._with_states = vocabulary + hidden, bool(hidden)
        while sum(map(len, self._rows)) < self.ticket.prompt:
            try:
                async with asyncio.timeout(TOKEN_SECONDS):
                    await self._progress.wait()
            except TimeoutError:
                raise GenerationFailedError(f"the hosts sent nothing for {TOKEN_SECONDS:g} s: try again") from None
            self._progress.clear()
            if not self._tokens.empty() and isinstance(failure := self._tokens.get_nowait(), P2PTrainError):
                raise failure
        return torch.cat(self._rows)

    def _progressed(self) -> tuple[int, ...]:
        return *super()._progressed(), len(self._rows)

    async def _listen_to(self, host: str) -> None:
        request = LogitsRequest(self.ticket.session, sum(map(len, self._rows)), self._with_states)
        async with self._open(host, LOGITS, request) as channel:
            await self._follow(host, channel, self._receive(host, request.session, channel))

    async def _receive(self, host: str, session: bytes, channel: Channel) -> None:
        while self.ticket.session == session:
            count = (await channel.receive(LogitRows, TOKEN_SECONDS)).rows
            data = await channel.receive_bytes(count * self._width * FLOAT_BYTES, TOKEN_SECONDS)
            if self.ticket.session == session:
                self._rows.append(torch.frombuffer(data, dtype=torch.float32).view(count, -1))
                self._progress.set()


def _explained(error: StageFailedError | NoHostError) -> P2PTrainError:
    if isinstance(error, NoHostError):
        return error
    if error.failed.cause is Cause.FULL:
        return OverloadedError(error.failed.retry_after or 1.0, f"all hosts are full ({error}): try again later")
    return GenerationFailedError(f"the hosts gave up ({error}): try again")
