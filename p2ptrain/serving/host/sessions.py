"""`SessionBook`: a host's sessions; it admits, finds and ends them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial

from p2ptrain.models.exact import PAGE
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.serving.errors import GrammarError
from p2ptrain.serving.grammar import Grammars, Matcher
from p2ptrain.serving.host.executor import Executor
from p2ptrain.serving.host.meter import Meter
from p2ptrain.serving.host.pool import PagePool, Pages, PoolFullError, key_of
from p2ptrain.serving.host.session import HostSession
from p2ptrain.serving.host.speculation import Speculation
from p2ptrain.serving.messages import (
    CLOCK_SECONDS,
    STALLED_SECONDS,
    TICKET_SECONDS,
    Cause,
    Failed,
    Open,
    Ticket,
)
from p2ptrain.signing import Signer
from p2ptrain.tasks import Tasks

ORPHAN_SECONDS = 10.0
"""Time for a caller to return, or for another one to come, before a session's pages are freed."""
COMPILE_SECONDS = 1.0
"""Timeout of a grammar's compilation; < `p2ptrain.serving.link.IMPATIENT_OPEN_SECONDS`."""
LOOK_SECONDS = 5.0
"""Interval of looks for sessions that are overdue."""
MAX_SESSIONS = 1024
MAX_SESSIONS_PER_CALLER = 64
"""Sessions of one client, or from one host: each takes up to two of a peer's `MAX_INBOUND_STREAMS_PER_PEER` streams."""
FULL_RETRY_SECONDS = 1.0
WAITING_SECONDS = 4.0
"""Time for which a refused client counts as waiting; > the longest pause before it asks again."""


class DeclinedError(Exception):
    """A session is not served; ``failed`` is the answer."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.reason)
        self.failed = failed


@dataclass(frozen=True)
class Offer:
    """A host's stage, of ``num_stages``, with its arithmetic, the most positions of a session, and its grammars.

    ``speculates`` is False for a first stage that drafts no tokens.
    """

    number: int
    num_stages: int
    arithmetic: str
    context: int
    speculates: bool = True
    grammars: Grammars | None = None

    @property
    def is_last(self) -> bool:
        return self.number == self.num_stages - 1

    def with_wire(self, wire: str) -> Offer:
        """Return the offer with ``fp32`` or ``int8`` between stages, as the arithmetic of a model in several says."""
        is_plain = wire == "fp32" or self.num_stages == 1
        return self if is_plain else replace(self, arithmetic=f"{self.arithmetic}/{wire}")


class SessionBook:
    """The sessions of one host.

    Attributes:
        open: Sessions by id.
        executor: Computes their rows.
        pool: Their pages.
        meter: Counts the last stage's requests and tokens.
    """

    def __init__(self, rpc: Rpc, signer: Signer, offer: Offer, pool: PagePool) -> None:
        """``signer`` is any signer with the swarm's type of key; it verifies tickets.

        A session that the pool cannot hold exceeds the offer's context.
        """
        self.meter = Meter()
        self.executor = Executor(rpc.runtime, offer.number, offer.num_stages - 1 - offer.number)
        self.open = self.executor.sessions
        self._rpc = rpc
        self._signer = signer
        self.offer = replace(offer, context=min(offer.context, pool.num_pages * PAGE))
        self.pool = pool
        self._is_closed = False
        self._waiting: dict[str, float] = {}
        self._tasks = Tasks()

    def holds(self, session: HostSession) -> bool:
        """True until the session ends."""
        return self.open.get(session.ticket.session) is session

    async def admit(self, request: Open, caller: str) -> HostSession:
        """Return the session of a caller's request, a new one if necessary.

        Raises:
            DeclinedError: It is not served here, or a newer caller has it.
        """
        ticket, offer = request.ticket, self.offer
        if len(request.epoch) != offer.number + 1 or len(ticket.route) != offer.num_stages:
            raise self._declined(Cause.BROKEN, "a route that does not fit the stage")
        self._check_route(request, caller)
        if (held := self.open.get(ticket.session)) is None or held.ticket != ticket:
            await self._check(ticket)
        if (session := self.open.get(ticket.session)) is not None:
            return self._found(session, request)
        key = (ticket.version.round, self._digest_of(ticket))
        if (stage := self.executor.stages.get(key)) is None:
            raise self._declined(Cause.VERSION, f"round {key[0]} is not served here")
        if any(id >= stage.vocabulary for id, _ in ticket.sampling.logit_bias):
            raise self._declined(Cause.BROKEN, f"logit_bias names a token beyond the vocabulary of {stage.vocabulary}")
        matcher = await self._matcher(ticket)
        own = [each for each in self.open.values() if each.ticket.client == ticket.client or each.is_of(caller)]
        if len(self.open) >= MAX_SESSIONS or len(own) >= MAX_SESSIONS_PER_CALLER:
            shadow = next((each for each in own if each.is_shadow), None)
            if request.is_shadow or shadow is None:
                raise self._declined(Cause.FULL, f"{len(self.open)} sessions are open", FULL_RETRY_SECONDS)
            self.end(shadow)
        try:
            self._check_share(request)
            pages = await self._reserve(ticket, request.is_shadow)
        except PoolFullError as error:
            if not request.is_shadow:
                self._waiting[ticket.client] = asyncio.get_running_loop().time()
            raise self._declined(Cause.FULL, str(error), FULL_RETRY_SECONDS) from error
        if self._is_closed:
            self.pool.free(pages)
            raise self._declined(Cause.OVER, "this host has stopped serving")
        self._waiting.pop(ticket.client, None)
        if (session := self.open.get(ticket.session)) is not None:  # Another caller came meanwhile.
            self.pool.free(pages)
            return self._found(session, request)
        session = HostSession(ticket, key, pages, stage, self.meter if offer.is_last else None, matcher)
        if offer.speculates and not offer.number:
            session.speculation = Speculation(self.meter)
        self.open[ticket.session] = session
        return session

    def _found(self, session: HostSession, request: Open) -> HostSession:
        if not session.ticket.is_like(request.ticket):
            raise self._declined(Cause.BROKEN, "another ticket for the same session")
        if request.epoch < session.epoch:
            raise self._declined(Cause.SUPERSEDED, "a newer caller has the session")
        return session

    def _check_route(self, request: Open, caller: str) -> None:
        """Raise `DeclinedError` unless the ticket is for this host, from this caller."""
        ticket, number = request.ticket, self.offer.number
        if caller not in (ticket.route[number - 1] if number else (ticket.client,)):
            raise self._declined(Cause.BROKEN, "its client did not choose this caller")
        if self._rpc.peer_id not in ticket.route[number] or request.feed not in ticket.route[0]:
            raise self._declined(Cause.BROKEN, "its client did not choose this host")

    def _digest_of(self, ticket: Ticket) -> bytes:
        """Return the digest of the stage's weights; raise `DeclinedError` if the ticket does not fit the host."""
        version, offer = ticket.version, self.offer
        if ticket.num_positions > offer.context:
            tokens = f"{ticket.prompt} tokens and {ticket.max_tokens} more"
            raise self._declined(Cause.BROKEN, f"{tokens} exceed the context of {offer.context}")
        if version.arithmetic != offer.arithmetic or len(version.digests) != offer.num_stages:
            text = f"this host computes {offer.arithmetic}, and the session {version.arithmetic}"
            raise self._declined(Cause.VERSION, text)
        return version.digests[offer.number]

    async def _matcher(self, ticket: Ticket) -> Matcher | None:
        """Return the matcher of a ticket's grammar, on the last stage; raise `DeclinedError` if there is none."""
        grammar, grammars = ticket.sampling.grammar, self.offer.grammars
        if grammar is None or not self.offer.is_last:
            return None
        if grammars is None or grammar.engine != grammars.engine:
            raise self._declined(Cause.VERSION, f"this host has no grammars of {grammar.engine}")
        try:
            async with asyncio.timeout(COMPILE_SECONDS):
                return await self._rpc.runtime.offload(grammars.compile, grammar.text, ticket.stops)
        except GrammarError as error:
            raise self._declined(Cause.BROKEN, f"grammar: {error}") from error
        except TimeoutError as error:
            raise self._declined(Cause.FULL, "the grammar takes long to compile", FULL_RETRY_SECONDS) from error

    def _check_share(self, request: Open) -> None:
        """Raise `PoolFullError` for a client's further session beyond half of the pages, while another waits."""
        client, now = request.ticket.client, asyncio.get_running_loop().time()
        self._waiting = {each: since for each, since in self._waiting.items() if now - since < WAITING_SECONDS}
        mine = [each for each in self.open.values() if each.ticket.client == client and not each.is_shadow]
        own = len({number for each in mine for number in each.pages.numbers})
        is_fair = 2 * (own + request.ticket.num_pages) <= self.pool.num_pages
        if own and not is_fair and not request.is_shadow and self._waiting.keys() - {client}:
            raise PoolFullError(f"this client has {own} of {self.pool.num_pages} pages, and others wait")

    async def _reserve(self, ticket: Ticket, is_shadow: bool) -> Pages:
        """Return pages, those of shadows if necessary; raise `PoolFullError` if there are too few.

        The first ones are the prefix pages that the pool has. The last stage computes the prompt's last row in any
        case, because the first token is drawn from it, and all rows for a client that wants their logits.
        """
        num_shared = (ticket.prompt - self.offer.is_last) // PAGE
        if self.offer.is_last and ticket.wants_logits:
            num_shared = 0
        keys = [key_of(ticket, each) for each in ticket.pages[:num_shared]]
        while True:
            try:
                return self.pool.reserve(ticket.num_pages, keys)
            except PoolFullError:
                shadows = [each for each in self.open.values() if each.is_shadow]
                if is_shadow or not shadows or self.pool.num_free + self._num_shadow_pages() < ticket.num_pages:
                    raise
                await asyncio.wait({self.end(shadows[0])})

    def _num_shadow_pages(self) -> int:
        """Return the number of pages that shadows have and no other session."""
        pages: dict[bool, set[int]] = {True: set(), False: set()}
        for each in self.open.values():
            pages[each.is_shadow].update(each.pages.numbers)
        return len(pages[True] - pages[False])

    async def _check(self, ticket: Ticket) -> None:
        """Raise `DeclinedError` unless an admitted client signed the ticket."""
        rpc, runtime = self._rpc, self._rpc.runtime
        if ticket.expires < runtime.now():
            raise self._declined(Cause.LIFETIME, "its ticket has expired: are the clocks right?")
        if ticket.expires > runtime.now() + TICKET_SECONDS + CLOCK_SECONDS:
            text = f"its ticket lasts longer than {TICKET_SECONDS:g} s: are the clocks right?"
            raise self._declined(Cause.LIFETIME, text)
        admitted = partial(rpc.gate.admitted, ticket.client, contributes=False)
        if admitted() and (reason := admitted(ticket.credential)):
            raise self._declined(Cause.BROKEN, f"its client is not in this swarm: {reason}")
        message = ticket.to_sign(rpc.swarm)
        if not await runtime.offload(self._signer.verify, ticket.client, message, ticket.signature):
            raise self._declined(Cause.BROKEN, "its client did not sign the ticket")

    def _declined(self, cause: Cause, reason: str, retry_after: float = 0.0) -> DeclinedError:
        return DeclinedError(Failed(self.offer.number, cause, reason[:256], retry_after))

    def drop_stale_pages(self) -> None:
        """Find the prefix pages of versions no more that are not served now."""
        number, stages = self.offer.number, self.executor.stages
        self.pool.drop(lambda key: (key.version.round, key.version.digests[number]) not in stages)

    async def run(self) -> None:
        """End sessions that make no progress, or whose tickets expire, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for session in list(self.open.values()):
                if (failure := self._overdue(session)) is not None:
                    session.fail(failure)
                    self.end(session)

    def _overdue(self, session: HostSession) -> Failed | None:
        """Return why a session has to end; None if it may go on. A shadow waits as long as its caller does."""
        number, now = self.offer.number, asyncio.get_running_loop().time()
        if session.ticket.expires < self._rpc.runtime.now():
            return Failed(number, Cause.LIFETIME, "its ticket has expired")
        # Later stages wait a little longer: the first one's end reaches them as a `Close`.
        if not session.is_shadow and now - session.progressed_at >= STALLED_SECONDS + 2 * LOOK_SECONDS * number:
            return Failed(number, Cause.STALLED, f"no row and no token for {STALLED_SECONDS:g} s")
        return None

    def leave(self, session: HostSession) -> None:
        """End a session that has lost its caller: at once if it failed, else unless there is one again in time."""
        if not self.holds(session):
            return
        if session.failure is None:
            self._tasks.start(self._end_orphan(session, session.epoch), "orphan")
            return
        if session.linking is not None:
            session.linking.cancel()  # Without a `Close`: a substitute finds the rows of the later stages.
        self.end(session)

    async def _end_orphan(self, session: HostSession, epoch: tuple[int, ...]) -> None:
        await asyncio.sleep(ORPHAN_SECONDS)
        if self.holds(session) and session.channel is None and session.epoch == epoch:
            self.end(session)

    def end(self, session: HostSession) -> asyncio.Task[None]:
        """Forget a session, and run its ``ends``; return the task that frees its pages."""
        del self.open[session.ticket.session]
        session.count_end()
        session.fail(Failed(self.offer.number, Cause.OVER, "the session is over"))
        for end in session.ends:
            end()
        return self._tasks.start(self._free(session), "free")

    async def _free(self, session: HostSession) -> None:
        """Give up a session's pages once no batch uses them; the full ones of one that did not fail are kept."""
        await self.executor.until_idle(session)
        if session.failure is not None and session.failure.cause is Cause.OVER:
            session.share(session.computed)
        self.pool.free(session.pages)

    async def close(self) -> None:
        """End all sessions, and admit none any more; idempotent."""
        self._is_closed = True
        for session in list(self.open.values()):
            self.end(session)
        await self._tasks.close()
