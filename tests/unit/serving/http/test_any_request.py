"""Any request that fits the OpenAPI document, and any that does not, gets an answer that the document has, in time.

A real server on loopback, with a small random model. Requests are drawn from the document's own schemas.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from p2ptrain.serving.http.openapi import document
from p2ptrain.serving.http.preparing import Limits
from p2ptrain.serving.http.schemas import NEUTRAL
from tests.support.exact import kernels
from tests.support.tools import needed
from tests.support.web.drawn import JUNK, damaged, values
from tests.support.web.schemas import misfits
from tests.support.web.small_server import small_server

pytestmark = needed("" if kernels() else "there is no library of exact kernels", "kernels")
COMPONENTS = document()["components"]["schemas"]
POSTS = sorted(path for path, operations in document()["paths"].items() if "post" in operations)
TIMEOUT_SECONDS = 60.0
"""Above the server's own; a request that takes as long hangs."""
EXAMPLES = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def schema_of(path: str) -> dict[str, Any]:
    found: dict[str, Any] = document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return found


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """Yield a client of a server that still answers at the end."""
    limits = Limits(generations=64, default_tokens=8, request_seconds=20.0)
    with small_server(limits) as url, httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS) as opened:
        yield opened
        assert opened.get("/health").status_code == 200


def check(client: httpx.Client, path: str, body: bytes) -> int:
    """Send a body; return the status of the answer, which is one that the document has."""
    response = client.post(path, content=body, headers={"content-type": "application/json"})
    documented = document()["paths"][path]["post"]["responses"]
    assert str(response.status_code) in documented, response.text
    assert response.status_code < 500, response.text
    event(f"{response.status_code}")
    content = documented[str(response.status_code)]["content"]
    if response.headers["content-type"].startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
        for line in lines:
            if line != "[DONE]":
                assert not list(
                    misfits(json.loads(line), content["text/event-stream"]["x-event-data"], components=COMPONENTS)
                )
    else:
        schema = content["application/json"]["schema"]
        assert not list(misfits(response.json(), schema, components=COMPONENTS)), response.text
    return response.status_code


@pytest.mark.parametrize("path", POSTS)
def test_what_fits_the_document_is_answered_or_refused_as_it_says(client: httpx.Client, path: str) -> None:
    answered: list[int] = []

    @EXAMPLES
    @given(body=values(schema_of(path), COMPONENTS), most=st.integers(1, 24))
    def ask(body: dict[str, Any], most: int) -> None:
        plain = {"model": "local", "messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "input": "Hi"}
        limit = {"max_output_tokens": most} if "input" in body else {"max_tokens": most, "max_completion_tokens": None}
        if "prompt" in body:
            del limit["max_completion_tokens"]
        body = {**body, "model": "local", **limit}
        if most % 2:  # Else nearly all are refused, for one of their many fields.
            body |= {name: plain[name] for name in plain.keys() & body.keys()}
            body = {name: each for name, each in body.items() if name not in ("logit_bias", "tools", "tool_choice")}
        answered.append(check(client, path, json.dumps(body).encode()))

    ask()
    assert answered.count(200) >= 10


@pytest.mark.parametrize("path", POSTS)
def test_what_differs_from_the_document_is_no_failure(client: httpx.Client, path: str) -> None:
    @EXAMPLES
    @given(data=st.data())
    def ask(data: st.DataObject) -> None:
        body = data.draw(values(schema_of(path), COMPONENTS).flatmap(damaged))
        if isinstance(body, dict):
            body |= data.draw(st.dictionaries(st.sampled_from(sorted(NEUTRAL)) | st.text(max_size=8), JUNK, max_size=1))
            body = {**body, "model": "local", "max_tokens": 4} if data.draw(st.booleans()) else body
        check(client, path, json.dumps(body).encode())

    ask()


@EXAMPLES
@given(body=st.binary(max_size=300) | JUNK.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_refused_by_name(client: httpx.Client, body: bytes) -> None:
    assert all(check(client, path, body) == 400 for path in POSTS)


KINDS = ["string", "integer", "number", "boolean", "null", "array", "object"]
WORDS = ["enum", "const", "pattern", "minimum", "maxLength", "$ref", "format", "not"]
INNER = ["items", "additionalProperties", "anyOf", "allOf", "properties"]
SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(KINDS).map(lambda kind: {"type": kind}) | st.dictionaries(st.sampled_from(WORDS), JUNK, max_size=3),
    lambda inner: st.dictionaries(
        st.sampled_from(INNER),
        inner | st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
        max_size=3,
    ),
    max_leaves=5,
)


@EXAMPLES
@given(schema=SCHEMAS)
def test_any_schema_gives_json_or_the_reason_why_not(client: httpx.Client, schema: dict[str, Any]) -> None:
    body = {
        "model": "local", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "seed": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }  # fmt: skip
    response = client.post("/v1/chat/completions", json=body)
    if response.status_code == 200 and (choice := response.json()["choices"][0])["finish_reason"] == "stop":
        json.loads(choice["message"]["content"])
    else:
        assert response.status_code in (200, 400), response.text
    same = {
        "model": "local", "input": "Hi", "max_output_tokens": 40, "seed": 1,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
    }  # fmt: skip
    answer = client.post("/v1/responses", json=same)
    assert answer.status_code == response.status_code, answer.text
    if answer.status_code == 200:
        told = [part["text"] for item in answer.json()["output"] for part in item["content"]]
        assert told == [response.json()["choices"][0]["message"]["content"]]
