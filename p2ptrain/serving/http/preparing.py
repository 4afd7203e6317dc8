"""From a request's body to prompts, settings and the form of the answer."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec

from p2ptrain.errors import ConfigError
from p2ptrain.serving.errors import ChatTemplateError, GrammarError, PromptTooLongError
from p2ptrain.serving.generation import Generator
from p2ptrain.serving.grammar import AnswerForm, Grammars
from p2ptrain.serving.http.answers import ChatForm, CompletionForm, Form
from p2ptrain.serving.http.generating import Prompt, Request
from p2ptrain.serving.http.problems import RequestError, refusal
from p2ptrain.serving.http.responses import ResponseForm
from p2ptrain.serving.http.schemas import (
    MAX_SEED,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    NamedTool,
    ResponseRequest,
    TextFormat,
)
from p2ptrain.serving.sampling import OWN_SETTINGS, Grammar, Sampling
from p2ptrain.serving.text import Text

T = TypeVar("T")

TOKEN_ID = re.compile(r"[0-9]{1,10}")
COMPILE_SECONDS = 2.0
"""Timeout of a grammar's compilation."""
RESPONSE_NAMES = {
    "messages": "input", "response_format": "text.format", "max_completion_tokens": "max_output_tokens",
}  # fmt: skip
"""Fields of a chat's request under the names that they have in a response's."""


@dataclass(frozen=True)
class Limits:
    """Bounds of one server.

    Attributes:
        generations: Largest number at once; further requests are answered with 429.
        body_bytes: Largest body of a request.
        request_seconds: Timeout of an answer, streams included.
        default_tokens: Length of an answer to a request that names none; the context may allow fewer.
        drain_seconds: How long requests in progress may take when the server stops; with the time to end the others
            < 30 s, after which Kubernetes kills it, and clients would see broken connections.
    """

    generations: int = 256
    body_bytes: int = 4 << 20
    request_seconds: float = 600.0
    default_tokens: int = 512
    drain_seconds: float = 20.0


class Preparing:
    """Prepares requests for one generator; text becomes tokens in a thread, one request at a time."""

    def __init__(self, generator: Generator, text: Text, limits: Limits, sampling: Sampling) -> None:
        self._generator = generator
        self._text = text
        self._limits = limits
        self._default = sampling
        self._encoding = asyncio.Lock()
        self._grammars: Grammars | None = None

    async def chat(self, body: ChatRequest, arrived: float) -> Form:
        """Return the form of an answer; raise `RequestError`, `ChatTemplateError` or `PromptTooLongError`."""
        self._check(body)
        if body.top_logprobs and not body.logprobs:
            raise RequestError(400, 'top_logprobs: needs "logprobs": true', "top_logprobs")
        form, messages = form_of(body), [message.plain() for message in body.messages]
        tools = [] if body.tool_choice == "none" else [msgspec.to_builtins(tool) for tool in body.tools]
        prompt = Prompt(await self._in_thread(lambda: self._text.encode_chat(messages, tools)))
        sampling = self._sampling(body, body.top_logprobs, want_logprob=body.logprobs)
        if form is not None:
            sampling = msgspec.structs.replace(sampling, grammar=await self._grammar(body, *form))
        request = await self._request(body, [prompt], sampling, arrived)
        request.tools = [tool["function"]["name"] for tool in tools]
        request.is_parallel = body.parallel_tool_calls
        return ChatForm(request, self._text, self._generator.model, **_told(body, has_logprobs=body.logprobs))

    async def _grammar(self, body: ChatRequest, field: str, form: AnswerForm) -> Grammar:
        """Return a checked grammar; raise `RequestError`, which names the field, if it cannot be used."""
        if body.ignore_eos:
            raise RequestError(400, "ignore_eos: an answer in a given form has an end: leave it out", "ignore_eos")
        async with self._encoding:
            try:
                grammar = Grammar(form.encode())
                grammars = self._grammars
                if grammars is None:
                    make = partial(Grammars, self._text.tokenizer, self._generator.vocabulary, self._text.end_ids)
                    grammars = self._grammars = await asyncio.to_thread(make)
                async with asyncio.timeout(COMPILE_SECONDS):
                    await asyncio.to_thread(grammars.compile, grammar.text, self._text.end_ids)
            except ConfigError as error:
                raise RequestError(400, f"{field}: {error}", field, "unsupported") from error
            except GrammarError as error:
                raise RequestError(400, f"{field}: {error}", field, "invalid_schema") from error
            except TimeoutError as error:
                raise RequestError(400, f"{field}: it takes too long to compile", field, "invalid_schema") from error
        return grammar

    async def response(self, body: ResponseRequest, arrived: float) -> Form:
        """Return the form of an answer; raise as `chat`."""
        try:
            form = await self.chat(body.chat(), arrived)
        except (RequestError, ChatTemplateError) as error:
            found = refusal(error)
            if (name := RESPONSE_NAMES.get(found.param or "")) is None:
                raise
            beginning = f"{found.param}: "
            text = f"{name}: {str(found).removeprefix(beginning)}" if str(found).startswith(beginning) else str(found)
            raise RequestError(found.status, text, name, found.code, found.headers) from error
        return ResponseForm(form.request, self._generator.model, body)

    async def completion(self, body: CompletionRequest, arrived: float) -> Form:
        """Return the form of an answer; raise `RequestError` or `PromptTooLongError`."""
        self._check(body)
        has_logprobs = body.logprobs is not None
        if body.echo and has_logprobs:
            raise RequestError(400, "echo: log-probabilities of a prompt are not there: leave out one of both", "echo")
        prompts = [await self._prompt(each, is_echoed=body.echo) for each in body.prompts()]
        sampling = self._sampling(body, body.logprobs or 0, want_logprob=has_logprobs)
        request = await self._request(body, prompts, sampling, arrived)
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
        biases = [(int(name), bias) for name, bias in body.logit_bias.items() if TOKEN_ID.fullmatch(name)]
        if len(biases) < len(body.logit_bias):
            raise RequestError(400, "logit_bias: its keys are token ids", "logit_bias", "invalid_value")
        self._check_ids([token_id for token_id, _ in biases], "logit_bias")
        given = {name: value for name in OWN_SETTINGS if (value := getattr(body, name)) is not None}
        return msgspec.structs.replace(
            self._default, **given, seed=secrets.randbits(63) if body.seed is None else body.seed & MAX_SEED,
            frequency_penalty=body.frequency_penalty, presence_penalty=body.presence_penalty,
            logit_bias=tuple(sorted(biases)), logprobs=logprobs, want_logprob=want_logprob,
        )  # fmt: skip

    async def _request(
        self, body: GenerationRequest, prompts: Sequence[Prompt], sampling: Sampling, arrived: float
    ) -> Request:
        context = self._generator.context or await self._generator.known_context()
        lengths = [self._length(each, body, context) for each in prompts]
        request = Request(
            prompts=prompts, n=body.n, sampling=sampling, max_tokens=lengths,
            stops=[body.stop] if isinstance(body.stop, str) else body.stop, ignore_eos=body.ignore_eos,
            each_token=sampling.want_logprob or body.return_token_ids, arrived=arrived,
        )  # fmt: skip
        if request.num_choices > self._limits.generations:
            text = f"n: {request.num_choices} choices are more than this server generates, {self._limits.generations}"
            raise RequestError(400, text, "n", "invalid_value")
        return request

    def _length(self, prompt: Prompt, body: GenerationRequest, context: int) -> int:
        """Return the largest number of tokens of an answer; raise if the context has no room for it."""
        number, (field, asked) = len(prompt.ids), body.asked
        if not number:
            raise RequestError(400, f"{body.prompt_field}: it has no tokens", body.prompt_field, "invalid_value")
        room = context - number
        if room <= 0:
            raise PromptTooLongError(f"the prompt has {number} tokens, and the context {context}: shorten it")
        if asked is not None and asked > room:
            raise RequestError(
                400,
                f"{field}: the prompt's {number} tokens and {asked} more exceed the context of {context}: ask for"
                f" {room} at most, or shorten the prompt",
                field,
                "context_length_exceeded",
            )
        return min(room, self._limits.default_tokens) if asked is None else asked


def form_of(body: ChatRequest) -> tuple[str, AnswerForm] | None:
    """Return the field that gives the answer a form, and the form; None if the answer is free.

    Raises `RequestError` if the fields contradict each other.
    """
    functions = {tool.function.name: tool.function.parameters or {"type": "object"} for tool in body.tools}
    if len(functions) < len(body.tools):
        raise RequestError(400, "tools: two functions have one name", "tools", "invalid_value")
    if body.tool_choice != "auto" and body.tool_choice != "none":
        if isinstance(body.tool_choice, NamedTool):
            name = body.tool_choice.function.name
            if name not in functions:
                raise RequestError(400, f"tool_choice: there is no function {name!r} in tools", "tool_choice")
            functions = {name: functions[name]}
        if not functions:
            raise RequestError(400, "tool_choice: needs tools", "tool_choice", "invalid_value")
        if not isinstance(body.response_format, TextFormat):
            raise RequestError(
                400, "response_format: an answer is a tool call or JSON: leave out one", "response_format"
            )
        is_parallel = body.parallel_tool_calls and body.tool_choice == "required"
        return "tools", AnswerForm(functions=functions, is_parallel=is_parallel)
    match body.response_format:
        case JsonObjectFormat():
            return "response_format", AnswerForm({"type": "object"})
        case JsonSchemaFormat(NamedSchema(schema=schema)):
            return "response_format", AnswerForm(schema)
    return None


def _told(body: GenerationRequest, *, has_logprobs: bool) -> dict[str, bool]:
    """Return what answers tell beside the text, as `Form` takes it."""
    has_usage = body.stream_options.include_usage
    return {"has_logprobs": has_logprobs, "has_ids": body.return_token_ids, "has_usage": has_usage}
