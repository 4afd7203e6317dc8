"""Answers of ``/v1/responses``, OpenAI's newer form: messages and calls, and a stream of typed and numbered events."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct, structs

from p2ptrain.serving.http.answers import Form
from p2ptrain.serving.http.generating import Piece, Request
from p2ptrain.serving.http.schemas import (
    Finish,
    Incomplete,
    OutputCall,
    OutputMessage,
    OutputText,
    ResponseAnswer,
    ResponseEvent,
    ResponseRequest,
    ResponseUsage,
    Status,
)
from p2ptrain.serving.tools import ToolCall


class ResponseForm(Form):
    """The answer to one request, which has one choice."""

    prefix = "resp"
    end = b""

    def __init__(self, request: Request, model: str, body: ResponseRequest) -> None:
        super().__init__(request, model)
        self._body = body
        self._items: list[OutputMessage | OutputCall] = []
        self._message_id = ""
        """Of the message that grows; empty between messages."""
        self._told = ""
        """The text of that message."""
        self._number = 0

    def events(self, piece: Piece) -> Iterator[Struct]:
        if not self._number:
            yield self._numbered("response.created", response=self._response())
            yield self._numbered("response.in_progress", response=self._response())
        if piece.text or (piece.finish is not None and not piece.calls and not self._items):
            yield from self._add_text(piece.text)
        for call in piece.calls:
            yield from self._end_message("completed")
            yield from self._add_call(call)
        if piece.finish is not None:
            yield from self._end_message(_status(piece.finish))
            end = f"response.{_status(piece.finish)}"
            yield self._numbered(end, response=self._response(piece.finish))

    def whole(self, pieces: Sequence[Piece]) -> Struct:
        """Return the response with which the stream of the same pieces ends."""
        last = [event for piece in pieces for event in self.events(piece)][-1]
        assert isinstance(last, ResponseEvent)
        assert isinstance(last.response, ResponseAnswer)
        return last.response

    def _numbered(self, kind: str, **fields: Any) -> ResponseEvent:
        self._number += 1
        return ResponseEvent(type=kind, sequence_number=self._number - 1, **fields)

    def _add_text(self, text: str) -> Iterator[ResponseEvent]:
        """Yield the events of text, after those of a message's beginning unless one has begun."""
        if not self._message_id:
            self._message_id = f"msg_{uuid.uuid4().hex}"
            begun = OutputMessage(id=self._message_id, content=[], status="in_progress")
            yield self._numbered("response.output_item.added", output_index=len(self._items), item=begun)
            yield self._numbered("response.content_part.added", **self._place(), part=OutputText(text=""))
        if text:
            self._told += text
            yield self._numbered("response.output_text.delta", **self._place(), delta=text, logprobs=[])

    def _end_message(self, status: Status) -> Iterator[ResponseEvent]:
        """Yield the events of a message's end, if one has begun."""
        if self._message_id:
            part = OutputText(text=self._told)
            yield self._numbered("response.output_text.done", **self._place(), text=self._told, logprobs=[])
            yield self._numbered("response.content_part.done", **self._place(), part=part)
            yield self._added(OutputMessage(id=self._message_id, content=[part], status=status))
            self._message_id = self._told = ""

    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self._items), "item_id": self._message_id, "content_index": 0}

    def _add_call(self, call: ToolCall) -> Iterator[ResponseEvent]:
        """Yield the events of a call, which comes whole."""
        number = uuid.uuid4().hex
        item = OutputCall(
            id=f"fc_{number}", call_id=f"call_{number[:24]}", name=call.name, arguments=call.arguments,
            status="completed",
        )  # fmt: skip
        place: dict[str, Any] = {"output_index": len(self._items), "item_id": item.id}
        begun = structs.replace(item, arguments="", status="in_progress")
        yield self._numbered("response.output_item.added", output_index=len(self._items), item=begun)
        yield self._numbered("response.function_call_arguments.delta", **place, delta=call.arguments)
        yield self._numbered("response.function_call_arguments.done", **place, arguments=call.arguments)
        yield self._added(item)

    def _added(self, item: OutputMessage | OutputCall) -> ResponseEvent:
        """Add an item to the response, and return the event of its end."""
        self._items.append(item)
        return self._numbered("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _response(self, finish: Finish | None = None) -> ResponseAnswer:
        usage, body = self.request.usage, self._body
        counts = ResponseUsage(
            usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, usage.prompt_tokens_details
        )
        return ResponseAnswer(
            id=self._id, created_at=self._created, model=self._model, system_fingerprint=self.request.version,
            status=_status(finish), output=list(self._items), usage=counts if finish else None,
            temperature=self.request.sampling.temperature, top_p=self.request.sampling.top_p,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens, text=body.text, tools=body.tools, tool_choice=body.tool_choice,
            parallel_tool_calls=body.parallel_tool_calls,
            incomplete_details=Incomplete() if finish == "length" else None,
        )  # fmt: skip


def _status(finish: Finish | None) -> Status:
    if finish is None:
        return "in_progress"
    return "incomplete" if finish == "length" else "completed"
