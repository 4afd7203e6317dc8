"""`Executor`: computes the rows of all sessions on one stage, in batches that sessions enter and leave at any time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from p2ptrain.errors import IntegrityError
from p2ptrain.models.exact import ExactStage, PageStore, Part
from p2ptrain.runtime import Runtime
from p2ptrain.serving.host.scheduler import Costs, Waiting, hold_until, next_batch
from p2ptrain.serving.host.session import HostSession, Key
from p2ptrain.serving.host.share import ComputeShare
from p2ptrain.serving.host.speculation import accept
from p2ptrain.serving.messages import Cause, Failed
from p2ptrain.serving.sampling import Drawn, Sampling, draw

logger = logging.getLogger(__name__)


class Share(NamedTuple):
    """One session's part of a batch.

    Attributes:
        draws: Tokens to draw, each by its position, with the final hidden state before it; None for one of the
            batch's rows. No token is drawn after one that differs from the id at its position.
    """

    session: HostSession
    part: Part
    inputs: torch.Tensor
    draws: list[tuple[int, torch.Tensor | None]]
    ids: list[int]
    prompt: int
    sampling: Sampling

    def draw(self, logits: torch.Tensor, at: int) -> Drawn:
        """Return the token of a position; raise `IntegrityError` if the ids do not fit the grammar."""
        ids, matcher = self.ids[:at], self.session.matcher
        allowed = matcher.allowed(ids[self.prompt :]) if matcher is not None else None
        return draw(logits, at, ids, self.sampling, self.prompt, allowed)


class Executor:
    """Computes one batch after another in `run`; `wake` announces work.

    Attributes:
        stages: The stage's weights in each served version.
        sessions: Those to compute, by id.
        share: Bounds the time that batches take.
        costs: Of batches so far.
        num_drawn: Tokens drawn since the start.
    """

    def __init__(self, runtime: Runtime, number: int, num_later: int = 0) -> None:
        """``number`` is the stage's, and ``num_later`` that of stages after it."""
        self.stages: dict[Key, ExactStage] = {}
        self.sessions: dict[bytes, HostSession] = {}
        self.store: PageStore | None = None
        self.share = ComputeShare()
        self.costs = Costs()
        self.num_drawn = 0
        self._runtime = runtime
        self._number, self._num_later = number, num_later
        self._work = asyncio.Event()
        self._busy: set[HostSession] = set()
        self._rested = asyncio.Event()

    def wake(self) -> None:
        self._work.set()

    async def until_idle(self, session: HostSession) -> None:
        """Wait until no batch uses a session's pages."""
        while session in self._busy:
            await self._rested.wait()

    async def run(self) -> None:
        """Compute until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._work.wait()
            self._work.clear()
            while batch := await self._next_in_turn():
                key, shares = batch
                self._busy, began = {share.session for share in shares}, loop.time()
                try:
                    await self._compute(key, shares)
                finally:
                    self.share.spend(loop.time() - began)
                    self._busy = set()
                    self._rested.set()
                    self._rested = asyncio.Event()

    async def _next_in_turn(self) -> tuple[Key, list[Share]] | None:
        """Return the next batch once it may begin; sessions that come meanwhile are in it."""
        await self.share.wait()
        await asyncio.sleep(0)  # A host of all stages feeds itself the tokens that it drew.
        with contextlib.suppress(TimeoutError):
            while until := self._hold_until():
                self._work.clear()
                async with asyncio.timeout_at(until):
                    await self._work.wait()
        return self._next()

    def _hold_until(self) -> float:
        sessions = [each for each in self.sessions.values() if not each.is_shadow]
        waiting = filter(None, (each.waiting() for each in sessions))
        return hold_until(waiting, self.costs, ((each.decoded_at, each.return_seconds) for each in sessions))

    def _next(self) -> tuple[Key, list[Share]] | None:
        """Return the next batch, of sessions of one version; None if nothing waits."""
        found: dict[Key, list[tuple[HostSession, Waiting]]] = {}
        for session in self.sessions.values():
            if (waiting := session.waiting()) is not None:
                found.setdefault(session.key, []).append((session, waiting))
        if not found:
            return None
        key = min(found, key=lambda each: min(waiting.since for _, waiting in found[each]))
        decoded_at = [session.decoded_at for session in self.sessions.values() if not session.is_shadow]
        now = asyncio.get_running_loop().time()
        chosen = next_batch([waiting for _, waiting in found[key]], self.costs, decoded_at, now, self._num_later)
        return key, [_share(found[key][index][0], rows) for index, rows in chosen]

    async def _compute(self, key: Key, shares: Sequence[Share]) -> None:
        """Compute one batch, and give the sessions their outputs and tokens."""
        if (stage := self.stages.get(key)) is None:
            return self._fail(shares, Cause.VERSION, f"round {key[0]} is not served any more")
        assert self.store is not None
        rows, began = sum(share.part.rows for share in shares), asyncio.get_running_loop().time()
        try:
            results = await self._runtime.serve(_compute, stage, self.store, shares)
        except Exception as error:
            if len(shares) > 1:  # One session's values spoil no other's.
                for share in shares:
                    await self._compute(key, [share])
                return
            if not isinstance(error, IntegrityError):
                logger.exception("a session's rows could not be computed")
            return self._fail(shares, Cause.BROKEN, str(error))
        if rows:
            self.costs.note(rows, asyncio.get_running_loop().time() - began)
        sent = [
            share.session.next_host
            for share, (_, drawn) in zip(shares, results, strict=True)
            if (drawn if share.session.is_last else share.part.first >= share.session.ticket.prompt)
        ]
        together = Counter(sent)
        for share, (outputs, drawn) in zip(shares, results, strict=True):
            self.num_drawn += len(drawn)
            share.session.journal.together = together[share.session.next_host]
            share.session.others = rows - share.part.rows
            share.session.done(outputs, drawn)

    def _fail(self, shares: Sequence[Share], cause: Cause, reason: str) -> None:
        for share in shares:
            share.session.fail(Failed(self._number, cause, reason[:256]))


def _share(session: HostSession, rows: int) -> Share:
    draws = [(at, session.final(at - 1)) for at in session.draws_after(rows)]
    part, inputs = session.take(rows)
    ticket = session.ticket
    # The session only appends to this list, or takes another one, so a batch may read it meanwhile.
    return Share(session, part, inputs, draws, session.ids, ticket.given, ticket.sampling)


def _compute(
    stage: ExactStage, store: PageStore, shares: Sequence[Share]
) -> list[tuple[torch.Tensor, dict[int, Drawn]]]:
    """Return each share's outputs, and its tokens by position."""
    working = [share for share in shares if share.part.rows]
    outputs = torch.empty(0, stage.hidden)
    if working:
        outputs = stage.step([share.part for share in working], torch.cat([share.inputs for share in working]), store)
    split = iter(torch.split(outputs, [share.part.rows for share in working]))
    mine = [next(split) if share.part.rows else torch.empty(0, stage.hidden) for share in shares]
    finals: list[torch.Tensor] = []
    for share, rows in zip(shares, mine, strict=True):
        for position, kept in share.draws:
            at = position - 1 - share.part.first
            finals.append(rows[at : at + 1] if kept is None else kept)
    logits = iter(stage.logits(torch.cat(finals)) if finals else ())
    return [(rows, _draw(share, [next(logits) for _ in share.draws])) for share, rows in zip(shares, mine, strict=True)]


def _draw(share: Share, logits: Sequence[torch.Tensor]) -> dict[int, Drawn]:
    """Return a share's tokens by position, as far as its drafts are right."""
    positions = [at for at, _ in share.draws]
    drafted = [share.ids[at] for at in positions if at < len(share.ids)]
    draws = (share.draw(row, at) for at, row in zip(positions, logits, strict=True))
    return dict(zip(positions, accept(drafted, draws), strict=False))
