"""The OpenAPI document of the server, generated from its schemas."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from p2ptrain._version import __version__
from p2ptrain.serving.http.problems import ErrorBody
from p2ptrain.serving.http.schemas import (
    ChatAnswer,
    ChatChunk,
    ChatRequest,
    CompletionAnswer,
    CompletionRequest,
    Health,
    Model,
    ModelList,
    ResponseAnswer,
    ResponseEvent,
    ResponseRequest,
)

_REFUSALS = {
    400: "A field is wrong; the error names it.",
    401: "The API key is missing or unknown.",
    404: "There is no such model.",
    408: "The answer took too long.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    422: "The model's chat template refuses the messages.",
    429: "Too many requests; retry-after has seconds.",
    503: "No answer is possible now; retry-after has seconds.",
}
_MODEL = {"name": "model", "in": "path", "required": True, "description": "its id", "schema": {"type": "string"}}
_OPERATIONS: tuple[tuple[str, str, type | None, tuple[type, ...], tuple[int, ...]], ...] = (
    ("/v1/models", "The model that is served, in a list.", None, (ModelList,), (401,)),
    ("/v1/models/{model}", "One model.", None, (Model,), (401, 404)),
    ("/v1/chat/completions", "Answer a conversation.", ChatRequest, (ChatAnswer, ChatChunk), tuple(_REFUSALS)),
    ("/v1/completions", "Continue prompts.", CompletionRequest, (CompletionAnswer, CompletionAnswer), tuple(_REFUSALS)),
    ("/v1/responses", "Answer, in the newer form.", ResponseRequest, (ResponseAnswer, ResponseEvent), tuple(_REFUSALS)),
    ("/health", "Whether a token can be generated.", None, (Health,), (503,)),
)
"""Path, description, body, answer (whole, and as an event), and codes of refusals of each operation."""
_JSON, _EVENTS = "application/json", "text/event-stream"


@cache
def document() -> dict[str, Any]:
    types = {each for _, _, body, answers, _ in _OPERATIONS for each in (body, *answers, ErrorBody) if each is not None}
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    paths = {path: {"post" if body else "get": _operation(path, text, body, answers, codes)}
             for path, text, body, answers, codes in _OPERATIONS}  # fmt: skip
    paths["/metrics"] = {"get": {"summary": "Counters for Prometheus.", "responses": {"200": {"description": "Text."}}}}
    info = {"title": "p2ptrain serve", "version": __version__, "description": "OpenAI's API over a swarm's model."}
    return {
        "openapi": "3.1.0", "info": info, "paths": paths, "security": [{}, {"key": []}],
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }  # fmt: skip


def _operation(
    path: str, text: str, body: type | None, answers: tuple[type, ...], codes: tuple[int, ...]
) -> dict[str, Any]:
    content = {_JSON: {"schema": _reference(answers[0])}}
    if len(answers) > 1:  # OpenAPI 3.1 has no word for the schema of an event's data.
        content[_EVENTS] = {"x-event-data": _reference(answers[1])}
    refusals = {
        str(code): {"description": _REFUSALS[code], "content": {_JSON: {"schema": _reference(ErrorBody)}}}
        for code in codes
    }
    operation: dict[str, Any] = {"summary": text, "responses": {"200": {"description": text, "content": content}}}
    operation["responses"] |= refusals
    if "{model}" in path:
        operation["parameters"] = [_MODEL]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": _reference(body)}}}
    return operation


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
