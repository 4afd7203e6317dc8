"""Answers of ``/v1/responses``, OpenAI's newer form: one message, and a stream of typed and numbered events."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from msgspec import Struct

from p2ptrain.serving.http.answers import Form
from p2ptrain.serving.http.generating import Piece, Request
from p2ptrain.serving.http.schemas import (
    Finish,
    Incomplete,
    OutputMessage,
    OutputText,
    ResponseAnswer,
    ResponseEvent,
    ResponseRequest,
    ResponseUsage,
)


class ResponseForm(Form):
    """The answer to one request, which has one choice."""

    prefix = "resp"
    end = b""

    def __init__(self, request: Request, model: str, body: ResponseRequest) -> None:
        super().__init__(request, model)
        self._body = body
        self._item_id = f"msg-{uuid.uuid4().hex}"
        self._told = ""
        self._number = 0

    def events(self, piece: Piece) -> Iterator[Struct]:
        here: dict[str, Any] = {"output_index": 0, "item_id": self._item_id, "content_index": 0}
        if not self._number:
            yield self._numbered("response.created", response=self._response(""))
            yield self._numbered("response.in_progress", response=self._response(""))
            yield self._numbered("response.output_item.added", output_index=0, item=self._item("", None))
            yield self._numbered("response.content_part.added", **here, part=OutputText(text=""))
        if piece.text:
            self._told += piece.text
            yield self._numbered("response.output_text.delta", **here, delta=piece.text, logprobs=[])
        if piece.finish is not None:
            whole = self._told
            yield self._numbered("response.output_text.done", **here, text=whole, logprobs=[])
            yield self._numbered("response.content_part.done", **here, part=OutputText(text=whole))
            yield self._numbered("response.output_item.done", output_index=0, item=self._item(whole, piece.finish))
            end = f"response.{_status(piece.finish)}"
            yield self._numbered(end, response=self._response(whole, piece.finish))

    def _answer(self, choices: Sequence[Piece]) -> Struct:
        return self._response(choices[0].text, choices[0].finish)

    def _numbered(self, kind: str, **fields: Any) -> ResponseEvent:
        self._number += 1
        return ResponseEvent(type=kind, sequence_number=self._number - 1, **fields)

    def _item(self, text: str, finish: Finish | None) -> OutputMessage:
        content = [OutputText(text=text)] if finish else []
        return OutputMessage(id=self._item_id, content=content, status=_status(finish))

    def _response(self, text: str, finish: Finish | None = None) -> ResponseAnswer:
        usage = self.request.usage
        counts = ResponseUsage(
            usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, usage.prompt_tokens_details
        )
        return ResponseAnswer(
            id=self._id, created_at=self._created, model=self._model, system_fingerprint=self.request.version,
            status=_status(finish),
            output=[self._item(text, finish)] if finish else [], usage=counts if finish else None,
            temperature=self._body.temperature, top_p=self._body.top_p, instructions=self._body.instructions,
            max_output_tokens=self._body.max_output_tokens,
            incomplete_details=Incomplete() if finish == "length" else None,
        )  # fmt: skip


def _status(finish: Finish | None) -> Literal["in_progress", "completed", "incomplete"]:
    if finish is None:
        return "in_progress"
    return "completed" if finish == "stop" else "incomplete"
