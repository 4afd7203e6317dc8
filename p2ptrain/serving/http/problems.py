"""Errors as HTTP answers in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import logging
import math

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from p2ptrain.errors import DeadlineError, P2PTrainError, UsageError
from p2ptrain.serving.errors import (
    ChatTemplateError,
    GrammarError,
    MixedHostsError,
    NoGrammarError,
    NoHostError,
    OverloadedError,
    PromptTooLongError,
)

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5
"""``retry-after`` of a failure that may be gone soon."""
_TYPES = {401: "authentication_error", 408: "timeout_error", 429: "rate_limit_error"}


class RequestError(UsageError):
    """A request is refused.

    Args:
        status: The HTTP status code.
        message: The fault and the remedy; it begins with the field, if one is at fault.
        param: The field at fault.
        code: A short name of the fault, for programs.
        headers: Headers of the answer.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}


class ErrorDetail(msgspec.Struct, frozen=True):
    """The fault and the remedy, the kind of fault, the field at fault, and a short name."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The answer to a request that failed."""

    error: ErrorDetail


def refusal(error: Exception) -> RequestError:
    """Return an error in HTTP's terms; an unknown one is logged, and its text stays here."""
    match error:
        case RequestError():
            return error
        case PromptTooLongError():
            return RequestError(400, str(error), code="context_length_exceeded")
        case ChatTemplateError():
            return RequestError(422, str(error), "messages", "chat_template")
        case GrammarError():
            return RequestError(400, str(error), code="invalid_schema")
        case OverloadedError():
            seconds = max(1, math.ceil(error.retry_after))
            return RequestError(429, str(error), code="overloaded", headers={"retry-after": str(seconds)})
        case DeadlineError():
            return RequestError(408, str(error), code="timeout")
        case P2PTrainError():
            code = "no_host" if isinstance(error, NoHostError) else "unavailable"
            code = "no_grammars" if isinstance(error, NoGrammarError) else code
            code = "mixed_hosts" if isinstance(error, MixedHostsError) else code
            return RequestError(503, str(error), code=code, headers={"retry-after": str(RETRY_SECONDS)})
        case HTTPException():
            return RequestError(error.status_code, _explained(error), headers=dict(error.headers or {}))
        case _:
            logger.error("a request failed", exc_info=error)
            return RequestError(500, "the server failed: its log says more", code="internal_error")


def _explained(error: HTTPException) -> str:
    if error.status_code == 404:
        return "no such path: /openapi.json lists all"
    if error.status_code == 405:
        return "this path does not take that method: /openapi.json lists all"
    return error.detail


def body_of(error: RequestError) -> bytes:
    """Return the JSON of a refusal."""
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return msgspec.json.encode(ErrorBody(ErrorDetail(str(error), kind, error.param, error.code)))


def answer_of(error: RequestError) -> Response:
    return Response(body_of(error), error.status, error.headers, "application/json")
