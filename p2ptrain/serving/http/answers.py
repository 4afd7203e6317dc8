"""Answers in OpenAI's forms, whole or as events of a stream."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from p2ptrain.serving.generation import Token
from p2ptrain.serving.http.generating import Piece, Request
from p2ptrain.serving.http.schemas import (
    AnswerMessage,
    Call,
    CallDelta,
    CalledFunction,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatLogprobs,
    ChunkChoice,
    CompletionAnswer,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    Finish,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from p2ptrain.serving.text import Text
from p2ptrain.serving.tools import ToolCall

LEAST_LOGPROB = -9999.0
"""Instead of minus infinity, which JSON lacks."""


class Form(ABC):
    """Turns the pieces of one request into answers.

    Attributes:
        end: The bytes at the end of a stream.
    """

    prefix: str
    end = b"data: [DONE]\n\n"

    def __init__(self, request: Request, model: str) -> None:
        self.request = request
        self._model = model
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    @abstractmethod
    def events(self, piece: Piece) -> Iterator[Struct]:
        """Yield a piece as events of a stream."""

    def last_events(self) -> Iterator[Struct]:
        """Yield the events that follow all pieces."""
        yield from ()

    @abstractmethod
    def whole(self, pieces: Sequence[Piece]) -> Struct:
        """Return all pieces of a request as one answer."""


class ChoicesForm(Form):
    """An answer with several choices.

    Args:
        has_logprobs: Answers tell the log-probabilities of their tokens.
        has_ids: Answers tell their tokens' ids.
        has_usage: A stream ends with the numbers of tokens.
    """

    def __init__(
        self, request: Request, text: Text, model: str, *, has_logprobs: bool, has_ids: bool, has_usage: bool
    ) -> None:
        super().__init__(request, model)
        self.has_logprobs, self.has_ids, self.has_usage = has_logprobs, has_ids, has_usage
        self._text = text
        self._has_begun = False

    def events(self, piece: Piece) -> Iterator[Struct]:
        """Yield a piece as events of a stream; the reason of the end is an event of its own.

        All choices begin before the first piece, in order: OpenAI's client takes their first events by position.
        """
        if not self._has_begun:
            self._has_begun = True
            for index in range(self.request.num_choices):
                yield from self._beginning(index)
        if piece.text or piece.calls or (piece.tokens and (self.has_logprobs or self.has_ids)):
            yield self._event(piece, None)
        if piece.finish is not None:
            yield self._event(Piece(piece.choice, "", ()), piece.finish)

    def whole(self, pieces: Sequence[Piece]) -> Struct:
        choices: Mapping[int, list[Piece]] = defaultdict(list)
        for piece in pieces:
            choices[piece.choice].append(piece)
        return self._answer([
            Piece(
                index, "".join(piece.text for piece in choices[index]),
                tuple(token for piece in choices[index] for token in piece.tokens), choices[index][-1].finish,
                tuple(call for piece in choices[index] for call in piece.calls),
            )
            for index in range(self.request.num_choices)
        ])  # fmt: skip

    @abstractmethod
    def _answer(self, choices: Sequence[Piece]) -> Struct: ...

    def last_events(self) -> Iterator[Struct]:
        if self.has_usage:
            yield self._usage_event()

    def _beginning(self, index: int) -> Iterator[Struct]:
        yield from ()

    @abstractmethod
    def _event(self, piece: Piece, finish: Finish | None) -> Struct: ...

    @abstractmethod
    def _usage_event(self) -> Struct: ...

    def _about(self) -> dict[str, Any]:
        version = self.request.version
        return {"id": self._id, "created": self._created, "model": self._model, "system_fingerprint": version}

    def _ids(self, tokens: Sequence[Token]) -> list[int] | UnsetType:
        return [token.id for token in tokens] if self.has_ids else UNSET

    def _prompt_ids(self, index: int) -> list[int] | UnsetType:
        return list(self.request.prompts[index // self.request.n].ids) if self.has_ids else UNSET

    def _token_text(self, token_id: int) -> str:
        """Return a token's text; a part of a character as OpenAI's ``bytes:\\xe2``."""
        raw = self._text.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _no_usage(self) -> Usage | UnsetType | None:
        return None if self.has_usage else UNSET


class ChatForm(ChoicesForm):
    """Answers of ``/v1/chat/completions``."""

    prefix = "chatcmpl"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._num_calls: dict[int, int] = defaultdict(int)
        """Calls of each choice that were sent."""

    def _usage_event(self) -> Struct:
        return ChatChunk(**self._about(), choices=[], usage=self.request.usage)

    def _beginning(self, index: int) -> Iterator[Struct]:
        choice = ChunkChoice(index=index, delta=Delta(role="assistant", content=""))
        yield ChatChunk(
            **self._about(), choices=[choice], usage=self._no_usage(), prompt_token_ids=self._prompt_ids(index)
        )

    def _event(self, piece: Piece, finish: Finish | None) -> Struct:
        choice = ChunkChoice(
            index=piece.choice, delta=Delta() if finish else self._delta(piece), finish_reason=finish,
            logprobs=None if finish else self._logprobs(piece.tokens),
            token_ids=UNSET if finish else self._ids(piece.tokens),
        )  # fmt: skip
        return ChatChunk(**self._about(), choices=[choice], usage=self._no_usage())

    def _delta(self, piece: Piece) -> Delta:
        begun = self._num_calls[piece.choice]
        self._num_calls[piece.choice] += len(piece.calls)
        calls = [
            CallDelta(each.id, each.function, index=index) for index, each in enumerate(_calls(piece.calls), begun)
        ]
        return Delta(content=piece.text or UNSET if calls else piece.text, tool_calls=calls or UNSET)

    def _answer(self, choices: Sequence[Piece]) -> Struct:
        told = [
            ChatChoice(
                index=piece.choice,
                message=AnswerMessage(
                    piece.text or (None if piece.calls else ""), tool_calls=_calls(piece.calls) or UNSET
                ),
                logprobs=self._logprobs(piece.tokens),
                finish_reason=piece.finish or "stop", token_ids=self._ids(piece.tokens),
            )
            for piece in choices
        ]  # fmt: skip
        return ChatAnswer(**self._about(), choices=told, usage=self.request.usage, prompt_token_ids=self._prompt_ids(0))

    def _logprobs(self, tokens: Sequence[Token]) -> ChatLogprobs | None:
        if not self.has_logprobs:
            return None
        return ChatLogprobs(
            [
                TokenLogprob(
                    **self._named(token.id, token.logprob),
                    top_logprobs=[TopLogprob(**self._named(*each)) for each in token.top],
                )
                for token in tokens
            ]
        )

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = list(self._text.token_bytes(token_id))
        return {"token": self._token_text(token_id), "logprob": max(logprob, LEAST_LOGPROB), "bytes": raw}


class CompletionForm(ChoicesForm):
    """Answers of ``/v1/completions``."""

    prefix = "cmpl"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._num_chars: dict[int, int] = defaultdict(int)
        """Characters that the tokens of each choice began."""
        self._told: set[int] = set()

    def _usage_event(self) -> Struct:
        return CompletionAnswer(**self._about(), choices=[], usage=self.request.usage)

    def _event(self, piece: Piece, finish: Finish | None) -> Struct:
        choice = self._choice(piece._replace(finish=finish), is_first=piece.choice not in self._told)
        self._told.add(piece.choice)
        return CompletionAnswer(**self._about(), choices=[choice], usage=self._no_usage())

    def _answer(self, choices: Sequence[Piece]) -> Struct:
        told = [self._choice(piece, is_first=True) for piece in choices]
        return CompletionAnswer(**self._about(), choices=told, usage=self.request.usage)

    def _choice(self, piece: Piece, *, is_first: bool) -> CompletionChoice:
        return CompletionChoice(
            index=piece.choice, text=piece.text, logprobs=self._logprobs(piece), finish_reason=piece.finish,
            token_ids=self._ids(piece.tokens), prompt_token_ids=self._prompt_ids(piece.choice) if is_first else UNSET,
        )  # fmt: skip

    def _logprobs(self, piece: Piece) -> CompletionLogprobs | None:
        if not self.has_logprobs or not piece.tokens:
            return None
        offsets = []
        for token in piece.tokens:
            offsets.append(self._num_chars[piece.choice])
            begun = sum(byte & 0xC0 != 0x80 for byte in self._text.token_bytes(token.id))
            self._num_chars[piece.choice] += begun
        top = [
            {self._token_text(each): max(logprob, LEAST_LOGPROB) for each, logprob in token.top}
            for token in piece.tokens
        ]
        return CompletionLogprobs(
            [self._token_text(token.id) for token in piece.tokens],
            [max(token.logprob, LEAST_LOGPROB) for token in piece.tokens],
            top if self.request.sampling.logprobs else None, offsets,
        )  # fmt: skip


def _calls(calls: Sequence[ToolCall]) -> list[Call]:
    """Return calls in OpenAI's form, each with an id of its own."""
    return [Call(f"call_{uuid.uuid4().hex[:24]}", CalledFunction(each.name, each.arguments)) for each in calls]
