"""The OpenAPI document describes all endpoints, and answers are as it says."""

import json
import re
from typing import Any

import pytest

from p2ptrain.serving.http.openapi import document
from tests.support.coroutines import on_loop
from tests.support.generators import CHAT, COMPLETIONS, MODEL, Repeater, chat, completion, events, http_server
from tests.support.web.schemas import misfits


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


@on_loop
async def test_responses_are_as_the_document_says() -> None:
    body = {"model": MODEL, "input": "Hi", "instructions": "Be brief."}
    async with http_server(Repeater("aü".encode())) as client:
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
