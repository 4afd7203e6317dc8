"""Generators for an HTTP server: one repeats a text, in steps that a test may allow; one has a small model."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import AsyncOpenAI

from p2ptrain.manifest import ModelSpec
from p2ptrain.models.exact import exact_stage
from p2ptrain.models.tokenizers import byte_tokenizer
from p2ptrain.serving.generation import Generation, Generator, Load, Token
from p2ptrain.serving.grammar import Grammars
from p2ptrain.serving.http.serve import serving_http
from p2ptrain.serving.sampling import Sampling
from tests.support.exact import lively_model, tokens_after

CONTEXT = 512
END = 256
MODEL = "p2p/tiny"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message comes first') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer() -> Any:
    """Return a tokenizer of bytes with a chat template, and with 256 as the token that ends an answer."""
    made = byte_tokenizer(CONTEXT)
    made.add_special_tokens({"eos_token": "<end>"})
    made.chat_template = TEMPLATE
    return made


@dataclass
class Repeater:
    """A generator whose every answer is ``reply``, a byte a token, and then the token that ends it.

    Attributes:
        steps: Allows tokens one by one; None lets all of them through.
        failure: Raised in place of the token after ``fails_after`` others.
        opened: Generations that began: their prompts, settings and lengths.
        running: Number of generations in progress.
        cached: Told by each generation.
    """

    reply: bytes = b"Hello, world."
    model: str = MODEL
    context: int = CONTEXT
    vocabulary: int = 257
    audits: dict[str, int] = field(default_factory=dict)
    loads: tuple[Load, ...] = ()
    steps: asyncio.Semaphore | None = None
    failure: Exception | None = None
    fails_after: int = 0
    sick: Exception | None = None
    num_probes: int = 0
    opened: list[tuple[list[int], Sampling, int, str]] = field(default_factory=list)
    running: int = 0
    cached: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    def generate(
        self, ids: Sequence[int], sampling: Sampling, *, max_tokens: int, stops: Sequence[int] = (), key: str = ""
    ) -> AbstractAsyncContextManager[Generation]:
        assert set(stops) <= {END, *self.reply}
        return self._generating(list(ids), sampling, max_tokens, key)

    async def known_context(self) -> int:
        while not self.context:  # noqa: ASYNC110 (tests set it)
            await asyncio.sleep(0.01)
        return self.context

    async def probe(self) -> None:
        self.num_probes += 1
        if self.sick is not None:
            raise self.sick
        async with self.generate([0], Sampling(), max_tokens=1) as generation:
            await anext(aiter(generation))

    async def until(self, running: int) -> None:
        """Wait until so many generations are in progress."""
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(lambda: self.running == running)

    @contextlib.asynccontextmanager
    async def _generating(
        self, ids: list[int], sampling: Sampling, max_tokens: int, key: str
    ) -> AsyncIterator[Generation]:
        self.opened.append((ids, sampling, max_tokens, key))
        await self._count(1)
        try:
            yield Repetition(self, len(ids), sampling, max_tokens)
        finally:
            await self._count(-1)

    async def _count(self, number: int) -> None:
        self.running += number
        async with self.changed:
            self.changed.notify_all()


class Repetition:
    """One answer; the log-probability of a token is -0.5, and the next id's is -1.5."""

    route: tuple[str, ...] = ("peer",)
    failovers = 0
    version = "7-abcdef"

    def __init__(self, owner: Repeater, first: int, sampling: Sampling, max_tokens: int) -> None:
        self._owner, self._first, self._sampling, self._max_tokens = owner, first, sampling, max_tokens
        self.cached = owner.cached

    async def __aiter__(self) -> AsyncIterator[Token]:
        owner = self._owner
        for place, token_id in enumerate([*owner.reply, END][: self._max_tokens]):
            if owner.steps is not None:
                await owner.steps.acquire()
            if owner.failure is not None and place >= owner.fails_after:
                raise owner.failure
            top = tuple(((token_id + rank) % 257, -0.5 - rank) for rank in range(self._sampling.logprobs))
            yield Token(self._first + place, token_id, -0.5, top)


class SmallModel:
    """A generator with a random model in this process; ``running`` counts its generations in progress."""

    model = "local"

    def __init__(self, spec: ModelSpec, tokenizer: Any) -> None:
        self.context, self.vocabulary = spec.context, spec.vocabulary
        self.audits: dict[str, int] = {}
        self.loads: tuple[Load, ...] = ()
        self.running = 0
        self._stage = exact_stage(lively_model(spec), spec)
        self._grammars = Grammars(tokenizer, spec.vocabulary)
        self._stage_lock = threading.Lock()

    async def known_context(self) -> int:
        return self.context

    async def probe(self) -> None:
        """The model is here."""

    @contextlib.asynccontextmanager
    async def generate(
        self, ids: Sequence[int], sampling: Sampling, *, max_tokens: int, stops: Sequence[int] = (), key: str = ""
    ) -> AsyncIterator[Generation]:
        grammar = sampling.grammar
        matcher = self._grammars.compile(grammar.text, stops) if grammar is not None else None
        self.running += 1
        try:
            yield SmallGeneration(
                tokens_after(self._stage, ids, sampling, max_tokens, matcher), stops, self._stage_lock
            )
        finally:
            self.running -= 1


class SmallGeneration:
    """One answer of a `SmallModel`."""

    route: tuple[str, ...] = ("local",)
    failovers = cached = 0
    version = "local"

    def __init__(self, tokens: Iterator[Token], stops: Sequence[int], lock: threading.Lock) -> None:
        self._tokens, self._stops, self._lock = tokens, stops, lock

    def _next(self) -> Token | None:
        with self._lock:
            return next(self._tokens, None)

    async def __aiter__(self) -> AsyncIterator[Token]:
        while (token := await asyncio.to_thread(self._next)) is not None:
            yield token
            if token.id in self._stops:
                return


@contextlib.asynccontextmanager
async def http_server(generator: Generator, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Serve a generator on loopback, and yield a client of it."""
    async with (
        serving_http(generator, options.pop("tokenizer", None) or tokenizer(), port=0, **options) as (url, _),
        httpx.AsyncClient(base_url=url, timeout=30.0, limits=httpx.Limits(max_connections=None)) as client,
    ):
        yield client


@contextlib.asynccontextmanager
async def openai_client(
    generator: Generator, *, key: str = "any", max_retries: int = 0, **options: Any
) -> AsyncIterator[AsyncOpenAI]:
    """Serve a generator on loopback, and yield OpenAI's client of it."""
    async with (
        http_server(generator, **options) as server,
        AsyncOpenAI(base_url=f"{server.base_url}v1", api_key=key, max_retries=max_retries, timeout=60) as client,
    ):
        yield client


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat(text: str = "Hi", **options: Any) -> dict[str, Any]:
    """Return the body of a chat request with one message."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **options}


def completion(prompt: Any = "Hi", **options: Any) -> dict[str, Any]:
    """Return the body of a completion request."""
    return {"model": MODEL, "prompt": prompt, **options}


async def events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the data of a stream's events; the last one is ``[DONE]``, or an error."""
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        return [data async for data in data_of(response)]


async def data_of(response: httpx.Response) -> AsyncIterator[Any]:
    """Yield the data of a stream's events as they come."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """Return an answer's error, after a look at its status and form."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"]
    assert "\n" not in error["message"]
    return error
