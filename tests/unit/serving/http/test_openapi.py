"""The OpenAPI document describes all endpoints, and answers are as it says."""

import json
import re
from typing import Any

import httpx
import pytest

from p2ptrain.serving.http.openapi import document
from tests.support.coroutines import on_loop
from tests.support.exact import kernels
from tests.support.generators import (
    CHAT,
    COMPLETIONS,
    MODEL,
    TEMPLATE,
    Repeater,
    chat,
    completion,
    events,
    http_server,
    tokenizer,
)
from tests.support.tools import needed
from tests.support.web.schemas import misfits
from tests.support.web.small_server import small_server


def schema_of(path: str, status: str = "200") -> dict[str, Any]:
    operation = next(iter(document()["paths"][path].values()))
    schema: dict[str, Any] = operation["responses"][status]["content"]["application/json"]["schema"]
    return schema


def event_of(path: str) -> dict[str, Any]:
    content = document()["paths"][path]["post"]["responses"]["200"]["content"]
    schema: dict[str, Any] = content["text/event-stream"]["x-event-data"]
    return schema


def check(value: Any, schema: dict[str, Any]) -> None:
    assert list(misfits(value, schema, components=document()["components"]["schemas"])) == []


@on_loop
async def test_the_document_is_served_and_names_all_that_it_refers_to() -> None:
    async with http_server(Repeater()) as client:
        answer = (await client.get("/openapi.json")).json()
    assert answer == json.loads(json.dumps(document()))
    assert set(answer["paths"]) == {
        "/v1/models", "/v1/models/{model}", CHAT, COMPLETIONS, "/v1/responses", "/health", "/metrics",
    }  # fmt: skip
    assert set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(answer))) == set(answer["components"]["schemas"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat(n=2)), (CHAT, chat(logprobs=True, top_logprobs=2, return_token_ids=True)),
        (COMPLETIONS, completion(["a", "b"])), (COMPLETIONS, completion(logprobs=2, return_token_ids=True)),
    ],
)  # fmt: skip
@on_loop
async def test_answers_and_events_are_as_the_document_says(path: str, body: dict[str, Any]) -> None:
    async with http_server(Repeater("aü".encode())) as client:
        check((await client.post(path, json=body)).json(), schema_of(path))
        *chunks, _ = await events(client, path, {**body, "stream_options": {"include_usage": True}})
        assert len(chunks) > 3
        for chunk in chunks:
            check(chunk, event_of(path))
        check((await client.post(path, json={**body, "n": 0})).json(), schema_of(path, "400"))
        check(body, {"$ref": f"#/components/schemas/{'ChatRequest' if path == CHAT else 'CompletionRequest'}"})


FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    "body",
    [
        {"input": "Hi", "instructions": "Be brief.", "text": {"format": {"type": "text"}}},
        {"input": "Hi", "tools": [FUNCTION], "tool_choice": "auto"},
        {"input": [{"role": "user", "content": "Hi"},
                   {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "1", "output": "3"}],
         "tools": [FUNCTION], "tool_choice": "none", "parallel_tool_calls": False},
    ],
    ids=["text", "tools", "results"],
)  # fmt: skip
@on_loop
async def test_responses_are_as_the_document_says(body: dict[str, Any]) -> None:
    body = {"model": MODEL, **body}
    shown = tokenizer()
    shown.chat_template = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + TEMPLATE
    async with http_server(Repeater(f"aü{CALL}b".encode()), tokenizer=shown) as client:
        check((await client.post("/v1/responses", json=body)).json(), schema_of("/v1/responses"))
        for event in await events(client, "/v1/responses", body):
            check(event, event_of("/v1/responses"))
        check(body, {"$ref": "#/components/schemas/ResponseRequest"})


@needed("" if kernels() else "there is no library of exact kernels", "kernels")
@on_loop
async def test_responses_in_a_form_are_as_the_document_says() -> None:
    forms: list[dict[str, Any]] = [
        {"text": {"format": {"type": "json_object"}}},
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"const": None}}}},
        {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "f"}},
    ]
    with small_server() as url:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for form in forms:
                body = {"model": "local", "input": "Hi", "max_output_tokens": 64, **form}
                check((await client.post("/v1/responses", json=body)).json(), schema_of("/v1/responses"))
                for event in await events(client, "/v1/responses", body):
                    check(event, event_of("/v1/responses"))
                check(body, {"$ref": "#/components/schemas/ResponseRequest"})


@on_loop
async def test_models_and_health_are_as_the_document_says() -> None:
    async with http_server(Repeater()) as client:
        check((await client.get("/v1/models")).json(), schema_of("/v1/models"))
        check((await client.get(f"/v1/models/{MODEL}")).json(), schema_of("/v1/models/{model}"))
        check((await client.get("/health")).json(), schema_of("/health"))
