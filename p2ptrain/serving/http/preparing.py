"""From a request's body to prompts, settings and the form of the answer."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from p2ptrain.serving.errors import PromptTooLongError
from p2ptrain.serving.generation import Generator
from p2ptrain.serving.http.answers import ChatForm, CompletionForm, Form
from p2ptrain.serving.http.generating import Prompt, Request
from p2ptrain.serving.http.problems import RequestError
from p2ptrain.serving.http.responses import ResponseForm
from p2ptrain.serving.http.schemas import (
    MAX_SEED,
    MAX_TOKENS,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    ResponseRequest,
)
from p2ptrain.serving.sampling import Sampling
from p2ptrain.serving.text import Text

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Bounds of one server.

    Attributes:
        generations: Largest number at once; further requests are answered with 429.
        body_bytes: Largest body of a request.
        request_seconds: Timeout of an answer, streams included.
        default_tokens: Length of an answer to a request that names none; the context may allow fewer.
        drain_seconds: How long requests in progress may take when the server stops.
    """

    generations: int = 256
    body_bytes: int = 4 << 20
    request_seconds: float = 600.0
    default_tokens: int = 512
    drain_seconds: float = 30.0


class Preparing:
    """Prepares requests for one generator; text becomes tokens in a thread, one request at a time."""

    def __init__(self, generator: Generator, text: Text, limits: Limits) -> None:
        self._generator = generator
        self._text = text
        self._limits = limits
        self._encoding = asyncio.Lock()

    async def chat(self, body: ChatRequest, arrived: float) -> Form:
        """Return the form of an answer; raise `RequestError`, `ChatTemplateError` or `PromptTooLongError`."""
        self._check(body)
        if body.top_logprobs and not body.logprobs:
            raise RequestError(400, 'top_logprobs: needs "logprobs": true', "top_logprobs")
        messages = [message.plain() for message in body.messages]
        prompt = Prompt(await self._in_thread(lambda: self._text.encode_chat(messages)))
        asked = body.max_completion_tokens or body.max_tokens
        sampling = self._sampling(body, body.top_logprobs, want_logprob=body.logprobs)
        request = self._request(body, [prompt], asked, sampling, arrived)
        return ChatForm(request, self._text, self._generator.model, **_told(body, has_logprobs=body.logprobs))

    async def response(self, body: ResponseRequest, arrived: float) -> Form:
        """Return the form of an answer; raise as `chat`."""
        form = await self.chat(body.chat(), arrived)
        return ResponseForm(form.request, self._generator.model, body)

    async def completion(self, body: CompletionRequest, arrived: float) -> Form:
        """Return the form of an answer; raise `RequestError` or `PromptTooLongError`."""
        self._check(body)
        has_logprobs = body.logprobs is not None
        if body.echo and has_logprobs:
            raise RequestError(400, "echo: log-probabilities of a prompt are not there: leave out one of both", "echo")
        prompts = [await self._prompt(each, is_echoed=body.echo) for each in body.prompts()]
        sampling = self._sampling(body, body.logprobs or 0, want_logprob=has_logprobs)
        request = self._request(body, prompts, body.max_tokens, sampling, arrived)
        return CompletionForm(request, self._text, self._generator.model, **_told(body, has_logprobs=has_logprobs))

    async def _prompt(self, prompt: str | list[int], *, is_echoed: bool) -> Prompt:
        if isinstance(prompt, str):
            return Prompt(await self._in_thread(lambda: self._text.encode(prompt)), prompt if is_echoed else "")
        self._check_ids(prompt, "prompt")
        return Prompt(prompt, await self._in_thread(lambda: self._text.decode(prompt)) if is_echoed else "")

    async def _in_thread(self, work: Callable[[], T]) -> T:
        async with self._encoding:
            return await asyncio.to_thread(work)

    def _check(self, body: GenerationRequest) -> None:
        if body.model != self._generator.model:
            text = f"model: {body.model!r} is not served here: ask for {self._generator.model!r}"
            raise RequestError(404, text, "model", "model_not_found")
        if body.stream_options.include_usage and not body.stream:
            raise RequestError(400, 'stream_options: needs "stream": true', "stream_options")

    def _check_ids(self, ids: Sequence[int], field: str) -> None:
        if (most := max(ids, default=0)) >= self._generator.vocabulary:
            text = f"{field}: there is no token {most}: the vocabulary has {self._generator.vocabulary}"
            raise RequestError(400, text, field, "invalid_value")

    def _sampling(self, body: GenerationRequest, logprobs: int, *, want_logprob: bool) -> Sampling:
        biases = [(int(name), bias) for name, bias in body.logit_bias.items() if name.isascii() and name.isdigit()]
        if len(biases) < len(body.logit_bias):
            raise RequestError(400, "logit_bias: its keys are token ids", "logit_bias", "invalid_value")
        self._check_ids([token_id for token_id, _ in biases], "logit_bias")
        return Sampling(
            temperature=body.temperature, top_p=body.top_p, top_k=body.top_k,
            seed=secrets.randbits(63) if body.seed is None else body.seed & MAX_SEED,
            frequency_penalty=body.frequency_penalty, presence_penalty=body.presence_penalty,
            repetition_penalty=body.repetition_penalty, logit_bias=tuple(sorted(biases)), logprobs=logprobs,
            want_logprob=want_logprob,
        )  # fmt: skip

    def _request(
        self, body: GenerationRequest, prompts: Sequence[Prompt], asked: int | None, sampling: Sampling, arrived: float
    ) -> Request:
        request = Request(
            prompts=prompts, n=body.n, sampling=sampling, max_tokens=[self._length(each, asked) for each in prompts],
            stops=[body.stop] if isinstance(body.stop, str) else body.stop, ignore_eos=body.ignore_eos,
            each_token=sampling.want_logprob or body.return_token_ids, arrived=arrived,
        )  # fmt: skip
        if request.num_choices > self._limits.generations:
            text = f"n: {request.num_choices} choices are more than this server generates, {self._limits.generations}"
            raise RequestError(400, text, "n", "invalid_value")
        return request

    def _length(self, prompt: Prompt, asked: int | None) -> int:
        """Return the largest number of tokens of an answer; raise if the context has no room for it."""
        number = len(prompt.ids)
        context = self._generator.context or MAX_TOKENS  # It may be unknown; then the generator refuses.
        if not number:
            raise RequestError(400, "prompt: it has no tokens", "prompt", "invalid_value")
        room = context - number
        if room <= 0:
            raise PromptTooLongError(f"the prompt has {number} tokens, and the context {context}: shorten it")
        if asked is not None and asked > room:
            raise PromptTooLongError(
                f"max_tokens: the prompt's {number} tokens and {asked} more exceed the context of {context}: "
                f"ask for {room} at most, or shorten the prompt"
            )
        return min(room, self._limits.default_tokens) if asked is None else asked


def _told(body: GenerationRequest, *, has_logprobs: bool) -> dict[str, bool]:
    """Return what answers tell beside the text, as `Form` takes it."""
    has_usage = body.stream_options.include_usage
    return {"has_logprobs": has_logprobs, "has_ids": body.return_token_ids, "has_usage": has_usage}
