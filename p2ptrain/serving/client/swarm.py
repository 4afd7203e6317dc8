"""`SwarmGenerator`: a language model that a swarm's hosts serve."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch

from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.serving.client.audit import Answer, Auditor, Tokens
from p2ptrain.serving.client.draft import Draft, Guesses, Proposals
from p2ptrain.serving.client.routes import (
    ANY,
    Host,
    Needs,
    Paces,
    Plan,
    RecentPrefixes,
    choose,
    expected,
    is_able,
    longest,
    sides,
)
from p2ptrain.serving.client.session import LogitsSession, SwarmSession
from p2ptrain.serving.errors import MixedHostsError, NoGrammarError, NoHostError, PromptTooLongError, VersionGoneError
from p2ptrain.serving.generation import Load
from p2ptrain.serving.messages import TICKET_SECONDS, Ticket, Version
from p2ptrain.serving.prefix import page_hashes
from p2ptrain.serving.sampling import Sampling
from p2ptrain.signing import Signer
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=SwarmSession)

LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class ServedModel:
    """The served model; ``blocks`` has those of each stage: the first, and the one after its last."""

    name: str
    vocabulary: int
    hidden: int
    blocks: tuple[tuple[int, int], ...]


class SwarmGenerator:
    """A `p2ptrain.serving.generation.Generator` on a swarm's hosts.

    Attributes:
        auditor: Leaves out hosts that compute other tokens than most.
        draft: Guesses tokens of generations that begin from now on; None for none, which leaves drafts to the hosts.
        audits: Its counts.
    """

    def __init__(
        self,
        rpc: Rpc,
        signer: Signer,
        model: ServedModel,
        hosts: Callable[[], Sequence[Host]],
        wait_seconds: float = 30.0,
        audit_share: float = 0.0,
    ) -> None:
        """``hosts`` returns the known hosts as of now; a stage without one is waited for ``wait_seconds``.

        ``audit_share`` of the answers are audited while `Auditor.run` runs.
        """
        self.model = model.name
        self.vocabulary, self._hidden = model.vocabulary, model.hidden
        self._blocks = model.blocks
        self._rpc = rpc
        self._signer = signer
        self._hosts = hosts
        self._wait_seconds = wait_seconds
        self._recent, self._paces = RecentPrefixes(), Paces()
        self.draft: Draft | None = None
        self.auditor = Auditor(rpc.runtime, audit_share, self._again, hosts)
        self.audits = self.auditor.counts

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer, by the hosts' records; 0 while a stage has no host."""
        return longest(self._hosts(), len(self._blocks))

    async def known_context(self) -> int:
        """Return `context` once each stage has a host; raise `NoHostError` if one has none for too long."""
        await self._first_plan(self._new_id(), ANY)
        return self.context

    @property
    def loads(self) -> list[Load]:
        """The load of each stage's hosts together."""
        of_stages: list[list[tuple[int, ...]]] = [[] for _ in self._blocks]
        for host in self._hosts():
            if is_able(host, len(self._blocks)):
                of_stages[host.served.stage].append((host.served.pages, host.served.free_pages, *host.drafts))
        return [Load(*map(sum, zip(*each, strict=True))) for each in of_stages]

    async def probe(self) -> None:
        """Generate a token; raise as `generate`, and at once if a stage has no host."""
        self._plan(bytes(16))
        async with self.generate([0], Sampling(temperature=0.0), max_tokens=1) as session:
            await anext(aiter(session))

    def generate(
        self, ids: Sequence[int], sampling: Sampling, *, max_tokens: int, stops: Sequence[int] = (), key: str = ""
    ) -> AbstractAsyncContextManager[SwarmSession]:
        """Generate tokens after a prompt; see `p2ptrain.serving.generation.Generator`.

        Raises:
            PromptTooLongError: Prompt and answer exceed the context, or the prompt is empty or has unknown tokens.
            NoHostError, OverloadedError, GenerationFailedError: From the iteration, too.
        """
        return self._open(SwarmSession, ids, sampling, max_tokens, stops, key)

    async def logits(self, ids: Sequence[int], with_states: bool = False) -> torch.Tensor:
        """Return the logits after each of some tokens, ``[tokens, vocabulary]``, fp32; raise as `generate`.

        With the states, a row goes on with the last normalisation's output: ``[tokens, vocabulary + hidden]``.
        """
        async with self._open(LogitsSession, ids, Sampling(temperature=0.0), 1) as session:
            return await session.logits(self.vocabulary, self._hidden if with_states else 0)

    @asynccontextmanager
    async def _open(
        self, kind: type[S], ids: Sequence[int], sampling: Sampling, max_tokens: int, stops: Sequence[int] = (),
        key: str = "",
    ) -> AsyncIterator[S]:  # fmt: skip
        rpc, id = self._rpc, self._new_id()
        engine = _engine(sampling)
        await self._first_plan(id, Needs(engine=engine))
        length = max_tokens if kind is SwarmSession else 0  # Nobody takes the token after a prompt's logits.
        if not 0 < len(ids) <= self.context - length:
            raise PromptTooLongError(
                f"a prompt of {len(ids)} tokens and an answer of {length} do not fit the context of {self.context}:"
                " shorten one of them"
            )
        if not 0 <= min(ids) <= max(ids) < self.vocabulary:
            raise PromptTooLongError(f"the prompt has a token that is not in the vocabulary of {self.vocabulary}")
        # Pages that a false host computed, or fed, are found no more.
        salt = hashlib.sha256(f"{self.auditor.num_differences}/{key}".encode()).digest()
        pages = page_hashes(ids)
        needs = Needs(len(ids) + max_tokens - 1, engine, self._recent.find(salt, pages))
        plan = await self._first_plan(id, needs)
        needs = needs._replace(engine=plan.engine or None)
        ticket = Ticket(
            id, rpc.peer_id, plan.version, len(ids), len(ids), max_tokens, _with_engine(sampling, plan.engine),
            self._expiry(), (), tuple(stops), rpc.credential, salt, pages, kind is LogitsSession,
        )  # fmt: skip
        self._recent.note(salt, pages, tuple(hosts[0] for hosts in plan.route))
        async with self._running(kind, ticket, ids, needs, self._renewed) as session, Tasks() as tasks:
            if self.draft is not None and kind is SwarmSession:
                guesses = Guesses(self.draft, ticket.sampling, ticket.given, len(ids) + max_tokens)
                proposals = Proposals(rpc.runtime, session.journal, guesses, ticket.num_positions)
                tasks.call(proposals.run(), "draft")
            try:
                yield session
                self._note_pace(session)
            finally:
                if all(session.route):
                    self._recent.note(salt, pages, session.route)
                if kind is SwarmSession and not session.failovers and session.ticket.version == plan.version:
                    answer = Answer(
                        plan.version, tuple(ids), ticket.sampling, ticket.stops, tuple(session.drawn), session.route
                    )
                    self.auditor.offer(answer)

    @asynccontextmanager
    async def _running(
        self, kind: type[S], ticket: Ticket, ids: Sequence[int], needs: Needs,
        renew: Callable[[Ticket], Awaitable[Ticket]],
    ) -> AsyncIterator[S]:  # fmt: skip
        """Run a session in the block."""

        async def plan(ticket: Ticket, without: frozenset[str]) -> Ticket:
            route = self._plan(ticket.session, needs._replace(without=without), ticket.version).route
            return await self._signed(msgspec.structs.replace(ticket, route=route))

        session = kind(self._rpc, ticket, list(ids), plan, renew, self._wait_seconds)
        async with Tasks() as tasks:
            running = tasks.call(session.run(), "generation")
            try:
                yield session
            finally:
                await session.close(running)

    async def _again(self, answer: Answer, route: Sequence[str]) -> Tokens:
        """Generate an answer again, on one route with the same weights."""
        number, needs = len(answer.tokens), Needs(engine=_engine(answer.sampling), among=frozenset(route))
        ticket = Ticket(
            self._new_id(), self._rpc.peer_id, answer.version, len(answer.ids), len(answer.ids), number,
            answer.sampling, self._expiry(), (), answer.stops, self._rpc.credential, self._new_id(),
        )  # fmt: skip

        async def end(ticket: Ticket) -> Ticket:
            raise VersionGoneError(f"round {ticket.version.round} is not served any more")

        async with self._running(SwarmSession, ticket, answer.ids, needs, end) as session:
            return tuple([token.id async for token in session])

    def _note_pace(self, session: SwarmSession) -> None:
        """Learn which hosts are slower than they claim."""
        costs, pace = expected(self._known()), session.pace
        if pace is not None and not session.failovers and all(peer in costs for peer in session.route):
            self._paces.note({peer: costs[peer] for peer in session.route}, pace, self._rpc.runtime.now())

    def _known(self) -> list[Host]:
        """Return the known hosts, with what their answers told."""
        now = self._rpc.runtime.now()
        return [host._replace(excess=self._paces.excess(host.peer, now)) for host in self._hosts()]

    def _expiry(self) -> float:
        return self._rpc.runtime.now() + TICKET_SECONDS

    def _new_id(self) -> bytes:
        return self._rpc.runtime.random.getrandbits(128).to_bytes(16, "big")

    async def _signed(self, ticket: Ticket) -> Ticket:
        message = ticket.to_sign(self._rpc.swarm)
        signature = await self._rpc.runtime.offload(self._signer.sign, message)
        return msgspec.structs.replace(ticket, signature=signature)

    async def _renewed(self, ticket: Ticket) -> Ticket:
        """Return a ticket like this one for another session, of the newest version, to be signed."""
        id = self._new_id()
        plan = await self._first_plan(id, Needs(ticket.num_positions, _engine(ticket.sampling)))
        return msgspec.structs.replace(ticket, session=id, version=plan.version, expires=self._expiry())

    async def _first_plan(self, id: bytes, needs: Needs) -> Plan:
        loop = asyncio.get_running_loop()
        deadline, told = loop.time() + self._wait_seconds, ""
        while True:
            try:
                return self._plan(id, needs)
            except NoHostError as error:
                left = deadline - loop.time()
                if left <= 0 or isinstance(error, NoGrammarError):
                    raise
                if str(error) != told:
                    told = str(error)
                    logger.warning("%s; waiting for up to %.0f s", told, left)
            await asyncio.sleep(LOOK_SECONDS)

    def _plan(self, id: bytes, needs: Needs = ANY, version: Version | None = None) -> Plan:
        hosts: Sequence[Host] = self._known()
        num_stages = len(self._blocks)
        if needs.among is None:
            hosts = self.auditor.trusted(hosts)
        found = choose(hosts, num_stages, id, needs, only=version)
        if isinstance(found, Plan):
            return found
        if version is not None and isinstance(choose(hosts, num_stages, id, needs), Plan):
            raise VersionGoneError(f"round {version.round} is not served any more")
        if mixed := sides(hosts, num_stages):
            raise MixedHostsError(found, self._blocks[found], mixed)
        is_served = needs.engine is not None and isinstance(choose(hosts, num_stages, id, Needs(needs.positions)), Plan)
        if is_served:
            raise NoGrammarError(found, self._blocks[found])
        raise NoHostError(found, self._blocks[found], is_whole=not any(is_able(host, num_stages) for host in hosts))


def _engine(sampling: Sampling) -> str | None:
    return sampling.grammar.engine if sampling.grammar is not None else None


def _with_engine(sampling: Sampling, engine: str) -> Sampling:
    if sampling.grammar is None:
        return sampling
    return msgspec.structs.replace(sampling, grammar=msgspec.structs.replace(sampling.grammar, engine=engine))
