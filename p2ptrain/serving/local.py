"""Generates in one process, without a network: the stages of a model, one after another.

A consumer that waits for a token computes the next batch for all sessions, so no task runs while nobody waits. A batch
has the next row of each session that generates, and chunks of prompts. Sessions begin and end at any time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import torch

from p2ptrain.models.exact import ExactStage, NotFiniteError, Part
from p2ptrain.serving.errors import GenerationFailedError, GrammarError, OverloadedError, PromptTooLongError
from p2ptrain.serving.generation import Generation, Token
from p2ptrain.serving.grammar import Grammars, Matcher
from p2ptrain.serving.host.pool import PagePool, Pages, PoolFullError, pages_for
from p2ptrain.serving.sampling import Sampling, draw
from p2ptrain.tasks import Tasks

MAX_WAITING_TOKENS = 8
"""Tokens that a slow consumer has not taken: its session pauses at this many."""
RETRY_SECONDS = 5.0
"""Told to a client that finds no free page."""


class LocalGeneration:
    """A session; see `p2ptrain.serving.generation.Generation`."""

    failovers = cached = 0
    version = "local"

    def __init__(
        self,
        generator: LocalGenerator,
        ids: Sequence[int],
        sampling: Sampling,
        max_tokens: int,
        stops: Sequence[int],
        pages: Pages,
        matcher: Matcher | None = None,
    ) -> None:
        self.matcher = matcher
        self.route = ("local",) * len(generator.stages)
        self.ids, self.sampling, self.pages = list(ids), sampling, pages
        self.prompt, self.stop = len(ids), len(ids) + max_tokens
        self._stops = frozenset(stops)
        self.done = 0
        """Positions that are computed."""
        self.waiting: deque[Token] = deque()
        self.failure: GenerationFailedError | None = None
        self._generator = generator

    def wants(self) -> int:
        """Return how many rows the session could compute now."""
        is_ended = len(self.ids) > self.prompt and self.ids[-1] in self._stops
        if self.failure or is_ended or len(self.ids) == self.stop or len(self.waiting) >= MAX_WAITING_TOKENS:
            return 0
        return len(self.ids) - self.done

    async def __aiter__(self) -> AsyncIterator[Token]:
        for _ in range(self.prompt, self.stop):
            while not self.waiting:
                if self.failure:
                    raise self.failure
                await self._generator.advance()
            token = self.waiting.popleft()
            yield token
            if token.id in self._stops:
                return


class LocalGenerator:
    """Generates with stages that are all in this process; see `p2ptrain.serving.generation.Generator`."""

    def __init__(
        self,
        stages: Sequence[ExactStage],
        *,
        model: str = "local",
        context: int | None = None,
        num_pages: int = 256,
        max_rows: int = 256,
        grammars: Grammars | None = None,
    ) -> None:
        """Reserve memory for pages, which the system provides on first use.

        Args:
            stages: All stages of a model, in order.
            context: Positions of a session, at most; None for those that the model was made for.
            max_rows: Rows of a batch, at most, beyond one a session.
            grammars: Compiles those of answers in a given form; without it, these are refused.
        """
        if not stages or not (stages[0].is_first and stages[-1].is_last):
            raise ValueError("these are not all stages of a model")
        self.stages = tuple(stages)
        self.model, self.vocabulary = model, stages[0].vocabulary
        self.context = context or stages[0].context
        self.audits: dict[str, int] = {}
        self.pool = PagePool(num_pages)
        self._stores = [stage.new_pages(num_pages) for stage in stages]
        self._max_rows = max_rows
        self._grammars = grammars
        self._sessions: list[LocalGeneration] = []
        self._batch: asyncio.Task[None] | None = None
        self._tasks = Tasks()

    async def probe(self) -> None:
        """Return at once: the model is here."""

    @asynccontextmanager
    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, max_tokens: int, stops: Sequence[int] = (), key: str = ""
    ) -> AsyncIterator[Generation]:
        """Begin a generation; see `p2ptrain.serving.generation.Generator`.

        Raises:
            PromptTooLongError: Prompt and tokens exceed the context.
            OverloadedError: Too few pages are free.
            GrammarError: The grammar is invalid, or there are no grammars here.
            ValueError: There is no prompt, or it has ids beyond the vocabulary.
        """
        if not ids or not 0 <= min(ids) <= max(ids) < self.vocabulary:
            raise ValueError(f"a prompt has one or more token ids below {self.vocabulary}")
        if len(ids) + max_tokens > self.context:
            raise PromptTooLongError(
                f"{len(ids)} tokens of the prompt and {max_tokens} new ones exceed the model's {self.context}: shorten"
                " the prompt, or ask for fewer"
            )
        matcher = await self._matcher(sampling, stops)
        try:
            pages = self.pool.reserve(pages_for(len(ids) + max_tokens))
        except PoolFullError as error:
            raise OverloadedError(RETRY_SECONDS, str(error)) from error
        session = LocalGeneration(self, ids, sampling, max_tokens, stops, pages, matcher)
        self._sessions.append(session)
        try:
            yield session
        finally:
            self._sessions.remove(session)
            session.failure = session.failure or GenerationFailedError("the generation was cancelled")
            # A batch that runs may still write to these pages. Their next owner's batch follows it.
            self.pool.free(pages)

    async def _matcher(self, sampling: Sampling, stops: Sequence[int]) -> Matcher | None:
        if sampling.grammar is None:
            return None
        if self._grammars is None:
            raise GrammarError("this generator has no grammars")
        return await asyncio.to_thread(self._grammars.compile, sampling.grammar.text, stops)

    async def advance(self) -> None:
        """Wait for the running batch, or compute the next one; it goes on if the caller is cancelled."""
        if self._batch is None or self._batch.done():
            self._batch = self._tasks.call(self._compute(), "local-batch")
        await asyncio.shield(self._batch)

    async def _compute(self) -> None:
        chosen = choose(self._sessions, self._max_rows)
        parts = [
            (session, Part(rows, session.done, session.pages.numbers), session.ids[session.done : session.done + rows])
            for session, rows in chosen
        ]
        try:
            tokens = await asyncio.to_thread(self._run, parts)
        except NotFiniteError as error:
            for number in error.parts:
                parts[number][0].failure = GenerationFailedError(str(error))
            return
        except Exception as error:  # told to each consumer
            for session, _, _ in parts:
                session.failure = GenerationFailedError(f"a batch failed: {error}")
            return
        for (session, part, _), token in zip(parts, tokens, strict=True):
            session.done += part.rows
            if token is not None:
                session.ids.append(token.id)
                session.waiting.append(token)

    def _run(self, parts: Sequence[tuple[LocalGeneration, Part, Sequence[int]]]) -> list[Token | None]:
        """Compute a batch; return the token of each session whose known ids it completes."""
        hidden = torch.tensor([each for _, _, ids in parts for each in ids])
        for stage, store in zip(self.stages, self._stores, strict=True):
            hidden = stage.step([part for _, part, _ in parts], hidden, store)
        ends = torch.tensor([part.rows for _, part, _ in parts]).cumsum(0) - 1
        complete = [part.first + part.rows == len(session.ids) for session, part, _ in parts]
        tokens: list[Token | None] = [None] * len(parts)
        if not any(complete):
            return tokens
        numbers = [number for number, each in enumerate(complete) if each]
        try:
            logits = self.stages[-1].logits(hidden[ends[complete]])
        except NotFiniteError as error:
            raise NotFiniteError([numbers[row] for row in error.parts]) from error
        for number, row in zip(numbers, logits, strict=True):
            session = parts[number][0]
            position, ids, matcher = len(session.ids), session.ids, session.matcher
            allowed = matcher.allowed(ids[session.prompt :]) if matcher is not None else None
            tokens[number] = Token(position, *draw(row, position, ids, session.sampling, session.prompt, allowed))
        return tokens


def choose(sessions: Sequence[LocalGeneration], max_rows: int) -> list[tuple[LocalGeneration, int]]:
    """Return sessions with their rows of the next batch: one a session that generates, the rest to prompts in order."""
    wanted = [(session, session.wants()) for session in sessions]
    chosen = [(session, 1) for session, rows in wanted if rows == 1]
    room = max(max_rows - len(chosen), 1)
    for session, rows in wanted:
        if rows > 1 and room:
            chosen.append((session, min(rows, room)))
            room -= chosen[-1][1]
    return chosen
