"""The generations of one request: all its choices at once, as text that arrives piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from p2ptrain.serving.generation import Generator, Token
from p2ptrain.serving.http.keys import Client
from p2ptrain.serving.http.metrics import Metrics
from p2ptrain.serving.http.schemas import MAX_SEED, CachedTokens, Finish, Usage
from p2ptrain.serving.sampling import Sampling
from p2ptrain.serving.text import StopStrings, Text, TextStream
from p2ptrain.serving.tools import ToolCall, ToolCalls
from p2ptrain.tasks import Tasks

QUEUED_PIECES = 64
"""Pieces that wait for a client that reads slowly; beyond them, its generations wait."""


class Prompt(NamedTuple):
    """A prompt's tokens, and the text with which its answers begin."""

    ids: Sequence[int]
    echoed: str = ""


class Piece(NamedTuple):
    """The next piece of one choice.

    Attributes:
        tokens: The drawn tokens behind it; their text may be held back, and come with a later piece.
        finish: Why the choice ends with this piece.
        calls: Tool calls that are complete.
    """

    choice: int
    text: str
    tokens: tuple[Token, ...]
    finish: Finish | None = None
    calls: tuple[ToolCall, ...] = ()


@dataclass
class Request:
    """A request for generations: ``n`` for each prompt.

    Attributes:
        each_token: Yield a piece for each token, also if it has no text.
        arrived: When it came, by the event loop's clock.
        version: The served weights; known with the first token.
        tools: Names of the functions whose calls an answer may have.
        is_parallel: False if an answer ends with its first call.
    """

    prompts: Sequence[Prompt]
    n: int
    sampling: Sampling
    max_tokens: Sequence[int]
    stops: Sequence[str]
    ignore_eos: bool
    each_token: bool
    arrived: float
    version: str = ""
    tools: Sequence[str] = ()
    is_parallel: bool = True
    num_generated: int = field(default=0, init=False)
    num_cached: int = field(default=0, init=False)

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompts)

    @property
    def usage(self) -> Usage:
        prompt = sum(len(prompt.ids) for prompt in self.prompts)
        return Usage(prompt, self.num_generated, prompt + self.num_generated, CachedTokens(self.num_cached))


class Generating:
    """Runs requests on a generator, counts their tokens, and decodes them."""

    def __init__(self, generator: Generator, text: Text) -> None:
        self.metrics = Metrics(generator)
        self._generator = generator
        self._text = text

    async def pieces(self, request: Request, client: Client) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of all choices, each choice's in order; closing it cancels all generations.

        Raises the error of the first generation that fails.
        """
        queue: asyncio.Queue[Piece | Exception] = asyncio.Queue(QUEUED_PIECES)

        async def run(index: int) -> None:
            try:
                async with aclosing(self._choice(request, index, client)) as pieces:
                    async for piece in pieces:
                        await queue.put(piece)
            except Exception as error:  # It comes after the pieces before it.
                await queue.put(error)

        num_prompt = request.usage.prompt_tokens
        self.metrics.prompt_tokens.inc(num_prompt)
        client.spend(num_prompt)
        async with Tasks() as tasks:
            for index in range(request.num_choices):
                tasks.start(run(index), f"choice-{index}")
            unfinished = request.num_choices
            while unfinished:
                match await queue.get():
                    case Piece() as piece:
                        unfinished -= piece.finish is not None
                        yield piece
                    case error:
                        raise error

    async def _choice(self, request: Request, index: int, client: Client) -> AsyncGenerator[Piece, None]:
        prompt = request.prompts[index // request.n]
        most = request.max_tokens[index // request.n]
        decoder, stops = TextStream(self._text, prompt.ids), StopStrings(request.stops)
        if prompt.echoed:
            yield Piece(index, prompt.echoed, ())
        drawn, is_end, is_stopped, is_calling = 0, True, False, False
        tools = ToolCalls(request.tools)
        async with aclosing(self._tokens(request, index, client)) as tokens:
            async for token in tokens:
                drawn += 1
                last: tuple[Token, ...] = (token,)
                is_end = token.id in self._text.end_ids and not request.ignore_eos
                text, is_stopped = stops.push("" if is_end else decoder.push(token.id))
                is_last = is_end or is_stopped or drawn == most
                if is_last:
                    break
                text, calls = tools.push(text) if request.tools else (text, [])
                if calls and not request.is_parallel:
                    yield Piece(index, text, last, "tool_calls", tuple(calls[:1]))
                    return
                is_calling = is_calling or bool(calls)
                if text or calls or request.each_token:
                    yield Piece(index, text, last, None, tuple(calls))
            else:  # The generator ended it.
                text, last, is_end = "", (), True
        if not is_stopped:
            text += stops.close()
        text, calls = tools.push(text) if request.tools else (text, [])
        text += tools.close()
        finish: Finish = "stop" if is_end or is_stopped else "length"
        if finish == "stop" and (calls or is_calling):
            finish = "tool_calls"
        yield Piece(index, text, last, finish, tuple(calls))

    async def _tokens(self, request: Request, index: int, client: Client) -> AsyncGenerator[Token, None]:
        """Yield the tokens of one generation, and count them."""
        metrics, now = self.metrics, asyncio.get_running_loop().time
        prompt, most = request.prompts[index // request.n], request.max_tokens[index // request.n]
        sampling = _with_seed(request.sampling, index % request.n)
        last = 0.0
        metrics.generations.inc()
        metrics.waiting.inc()
        try:
            ends = () if request.ignore_eos else tuple(sorted(self._text.end_ids))
            opened = self._generator.generate(prompt.ids, sampling, max_tokens=most, stops=ends, key=client.name)
            async with opened as generation:
                request.version = request.version or generation.version
                async for token in generation:
                    before, last = last, now()
                    if before:
                        metrics.token.observe(last - before)
                    else:
                        metrics.waiting.dec()
                        metrics.first_token.observe(last - request.arrived)
                        if not index % request.n:  # A prompt counts once.
                            request.num_cached += generation.cached
                            metrics.cached_tokens.inc(generation.cached)
                            metrics.prefix_hits.inc(generation.cached > 0)
                    metrics.generated_tokens.inc()
                    client.spend(1)
                    request.num_generated += 1
                    yield token
        finally:
            metrics.generations.dec()
            if not last:
                metrics.waiting.dec()


def _with_seed(sampling: Sampling, index: int) -> Sampling:
    """Return the settings of one choice: each draws from a seed of its own."""
    return msgspec.structs.replace(sampling, seed=(sampling.seed + index) & MAX_SEED)
