"""The OpenAPI document of ``/api/v1``, generated from the view classes."""

from __future__ import annotations

import types
import typing
from functools import cache
from typing import Any, Literal, get_args, get_origin

from p2ptrain._version import __version__
from p2ptrain.monitor import store
from p2ptrain.status import views

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", bytes: "string"}


@cache
def document() -> dict[str, Any]:
    schemas: dict[str, Any] = {}
    paths = {f"/api/v1{path}": {"get": _operation(text, answer, asked, schemas)} for path, text, answer, *asked in _API}
    events = {"description": "Events of the kind snapshot, as text/event-stream.", "content": {"text/event-stream": {}}}
    paths["/api/v1/stream"] = {"get": {"summary": "What changes, as it changes.", "responses": {"200": events}}}
    info = {"title": "p2ptrain monitor", "version": __version__, "description": "A swarm, as its peers describe it."}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _whole(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": text, "schema": {"type": "integer", "minimum": 0}}


def _text(name: str, text: str, choices: tuple[str, ...] = ()) -> dict[str, Any]:
    schema = {"type": "string", **({"enum": list(choices)} if choices else {})}
    return {"name": name, "in": "query", "description": text, "schema": schema}


_LIMIT = _whole("limit", "how many at most")
_PEER = {"name": "peer", "in": "path", "required": True, "description": "a peer's id", "schema": {"type": "string"}}
_API: tuple[tuple[Any, ...], ...] = (
    ("/snapshot", "All that is known now.", views.Snapshot),
    ("/headline", "Whether the swarm is healthy, and its main numbers.", views.Headline),
    ("/alerts", "What holds now.", {"alerts": [views.Alert]}),
    ("/stages", "Who hosts which part of the model.", {"stages": [views.StageView]}),
    ("/groups", "Who averaged with whom in the last certified round.", {"groups": [views.GroupView]}),
    ("/serving", "What all peers together serve, and how fast.", views.ServingView),
    ("/sites", "What the sites of a private swarm measured, over rounds.", {"sites": [views.SiteCurve]}),
    (
        "/peers", "Peers, searched and sorted.", {"total": int, "peers": [views.PeerView]},
        _text("search", "in name, id, role and state"), _text("sort", "a column; with - in front, descending"),
        _whole("offset", "how many to leave out"), _LIMIT,
    ),
    (
        "/peers/table", "Some columns of all peers, in few bytes.",
        {"at": float, "columns": [str], "rows": [list[Any]]},
    ),
    ("/peers/{peer}", "One peer.", (views.PeerView, {"contribution": store.Contribution | None}), _PEER),
    ("/rounds", "Rounds, newest first.", {"rounds": [views.RoundView]}, _whole("before", "a round"), _LIMIT),
    ("/leaders", "Who gave most.", {"leaders": [store.Contribution]}, _LIMIT),
    (
        "/events", "What happened, newest first.", {"events": [views.Event]},
        _text("since", "seconds since 1970"), _LIMIT,
    ),
    (
        "/series", "Numbers over time.", {"step": int, "at": [int], "series": dict[str, list[float | None]]},
        _text("window", "how far back", tuple(store.WINDOWS)),
        _text("names", f"separated by commas, of: {', '.join(store.ALL_SERIES)}"),
    ),
    ("/join", "What the swarm agreed on, and how to join it.", views.SwarmView),
)  # fmt: skip
"""Path, description, answer (see `_schema`) and parameters of each operation."""


def _operation(text: str, answer: Any, asked: list[dict[str, Any]], schemas: dict[str, Any]) -> dict[str, Any]:
    answers = {"200": _answer(text, answer, schemas), "default": _answer("What is wrong.", {"error": str}, schemas)}
    return {"summary": text, "parameters": asked, "responses": answers}


def _answer(text: str, kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": _schema(kind, schemas)}}}


def _schema(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type, a dict of types by name, a list of one type, or a tuple of types (``allOf``)."""
    if isinstance(kind, tuple):
        return {"allOf": [_schema(each, schemas) for each in kind]}
    if isinstance(kind, dict):
        properties = {name: _schema(value, schemas) for name, value in kind.items()}
        return {"type": "object", "properties": properties, "required": list(kind)}
    if isinstance(kind, list):
        return {"type": "array", "items": _schema(kind[0], schemas)}
    if isinstance(kind, type) and (fields := views.fields_of(kind)):
        if kind.__name__ not in schemas:
            schemas[kind.__name__] = {}  # Reserved first, because its fields may refer to it.
            schemas[kind.__name__] = _schema(fields, schemas)
        return {"$ref": f"#/components/schemas/{kind.__name__}"}
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(each, schemas) for each in inner]}
    if origin is Literal:
        return {"type": "string", "enum": list(inner)}
    if origin is list or (origin is tuple and inner[-1] is Ellipsis):
        return {"type": "array", "items": _schema(inner[0], schemas)}
    if origin is tuple:
        return {"type": "array", "prefixItems": [_schema(each, schemas) for each in inner]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(inner[1], schemas)}
    if kind is type(None):
        return {"type": "null"}
    return {"type": _PLAIN[kind]} if kind in _PLAIN else {}
