"""Each fault has its status, a message that names field and remedy, and no other effect."""

import asyncio
import json
from typing import Any

import pytest

from p2ptrain.errors import PeerLostError
from p2ptrain.models.tokenizers import byte_tokenizer
from p2ptrain.serving.errors import (
    GenerationFailedError,
    MixedHostsError,
    NoHostError,
    OverloadedError,
    PromptTooLongError,
)
from p2ptrain.serving.http import app, streaming
from p2ptrain.serving.http.preparing import Limits
from p2ptrain.serving.http.schemas import NEUTRAL, ChatRequest, CompletionRequest, ResponseRequest
from tests.support.coroutines import on_loop
from tests.support.generators import (
    CHAT,
    COMPLETIONS,
    MODEL,
    Repeater,
    chat,
    completion,
    error_of,
    events,
    http_server,
)

RESPONSES = "/v1/responses"
CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def schema_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 2.5}, "temperature"), ({"temperature": "hot"}, "temperature"), ({"top_p": 0}, "top_p"),
    ({"top_p": 1e-7}, "top_p"), ({"top_k": -1}, "top_k"), ({"n": 17}, "n"), ({"n": 0}, "n"), ({"n": True}, "n"),
    ({"stop": list("abcde")}, "stop"),
    ({"stop": ""}, "stop"), ({"stop": [1]}, "stop[0]"), ({"max_tokens": 0}, "max_tokens"), ({"seed": 1.5}, "seed"),
    ({"seed": 1 << 64}, "seed"), ({"presence_penalty": -3}, "presence_penalty"),
    ({"frequency_penalty": 3}, "frequency_penalty"), ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"), ({"logit_bias": {"999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
    ({"logit_bias": {str(each): 1 for each in range(1025)}}, "logit_bias"), ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"), ({"tempreature": 1}, "tempreature"),
    ({"user": "x" * 300}, "user"), ({"model": ""}, "model"), ({"model": None}, "model"),
]  # fmt: skip
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FLAT_TOOL: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools[0].function"), ({"tools": [TOOL] * 2}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": "some"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"), ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": schema_of({"type": "nonsense"})}, "response_format"),
    ({"response_format": schema_of({"enum": ["x" * 40_000]})}, "response_format"),
    ({"response_format": schema_of({}), "ignore_eos": True}, "ignore_eos"),
    ({"messages": [{"role": "user", "tool_calls": [CALL]}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "["}}]}]},
     "messages"),
    ({"messages": []}, "messages"), ({"messages": None}, "messages"), ({"messages": "Hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
    ({"top_logprobs": 2}, "top_logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
]  # fmt: skip
WRONG_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [TOOL]}, "tools"), ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"), ({"prompt": None}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"), ({"prompt": [257]}, "prompt"), ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": ["a"] * 33}, "prompt"), ({"prompt": [1.5]}, "prompt[0]"), ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"), ({"echo": True, "logprobs": 1}, "echo"), ({"logprobs": True}, "logprobs"),
]  # fmt: skip


WRONG_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"), ({"input": []}, "input"), ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "function_call_output", "role": "user", "content": ""}]}, "input[0]"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input[0].arguments"),
    ({"input": [{"role": "user", "content": "Hi", "output": "x"}]}, "input[0]"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "["}]}, "input"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"), ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}}, "text.format"),
    ({"tools": [TOOL]}, "tools[0].function"), ({"tools": [FLAT_TOOL] * 2}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [FLAT_TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"tools": [FLAT_TOOL], "tool_choice": "required", "text": {"format": {"type": "json_object"}}}, "text.format"),
    ({"previous_response_id": "resp-1"}, "previous_response_id"), ({"store": True}, "store"),
    ({"max_output_tokens": 0}, "max_output_tokens"), ({"n": 2}, "n"), ({"temperature": 3}, "temperature"),
]  # fmt: skip


@on_loop
async def test_a_wrong_field_is_named_with_its_bound() -> None:
    generator = Repeater()
    async with http_server(generator) as client:
        for path, good, cases in (
            (CHAT, chat(), WRONG + WRONG_CHATS), (COMPLETIONS, completion(), WRONG + WRONG_COMPLETIONS),
            (RESPONSES, {"model": MODEL, "input": "Hi"}, WRONG_RESPONSES),
        ):  # fmt: skip
            for wrong, field in cases:
                error = error_of(await client.post(path, json={**good, **wrong}), 400)
                assert error["param"] == field, (wrong, error)
                assert error["message"].startswith(f"{field}: "), error
                assert error["type"] == "invalid_request_error"
    assert generator.opened == []


@on_loop
async def test_whole_numbers_may_be_written_with_a_point() -> None:
    generator = Repeater()
    async with http_server(generator) as client:
        assert (await client.post(CHAT, json=chat(n=2.0, top_k=3.0, temperature=1))).status_code == 200
    assert len(generator.opened) == 2


def test_no_field_is_both_supported_and_refused() -> None:
    """But for those that completions lack."""
    tools = {"tools", "tool_choice", "parallel_tool_calls"}
    assert set(CompletionRequest.__struct_fields__).isdisjoint(NEUTRAL)
    assert set(ResponseRequest.__struct_fields__) & NEUTRAL.keys() == tools
    assert set(ChatRequest.__struct_fields__) & NEUTRAL.keys() == tools | {"response_format"}


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"null", b'"x"', b"\xff", b'{"model": NaN}', b"[" * 100_000, b'{"a": "\\ud800"}']
)
@on_loop
async def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    async with http_server(Repeater()) as client:
        for path in (CHAT, COMPLETIONS):
            response = await client.post(path, content=body, headers={"content-type": "application/json"})
            assert error_of(response, 400)["code"] == "invalid_json"


@on_loop
async def test_only_json_is_taken_so_that_pages_of_other_sites_cannot_ask() -> None:
    generator = Repeater()
    async with http_server(generator) as client:
        for headers in ({}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}):
            response = await client.post(CHAT, content=json.dumps(chat()), headers=headers)
            assert error_of(response, 415)["param"] == "content-type"
        preflight = await client.options(
            CHAT, headers={"origin": "http://evil", "access-control-request-method": "POST"}
        )
        error_of(preflight, 405)
        assert "access-control-allow-origin" not in preflight.headers
        headers = {"content-type": "application/json; charset=utf-8"}
        assert (await client.post(CHAT, content=json.dumps(chat()), headers=headers)).status_code == 200
        assert (await client.post(CHAT, json=chat(), headers={"host": "evil.example"})).status_code == 421
    assert len(generator.opened) == 1


@on_loop
async def test_other_models_and_paths_are_not_found() -> None:
    async with http_server(Repeater()) as client:
        for path, body in ((CHAT, chat()), (COMPLETIONS, completion())):
            error = error_of(await client.post(path, json={**body, "model": "gpt-4"}), 404)
            assert (error["param"], error["code"]) == ("model", "model_not_found")
            assert repr(MODEL) in error["message"], "the error names the model that is there"
            error_of(await client.get(path), 405)
        error_of(await client.get("/v1/models/gpt-4"), 404)
        error_of(await client.get("/v1/embeddings"), 404)
        error_of(await client.get("/static/../app.py"), 404)


@on_loop
async def test_a_prompt_that_is_too_long_is_refused_with_what_would_fit() -> None:
    async with http_server(Repeater(context=100)) as client:
        for path, body in ((CHAT, chat("x" * 100)), (COMPLETIONS, completion("x" * 100))):
            error = error_of(await client.post(path, json=body), 400)
            assert error["code"] == "context_length_exceeded"
        error = error_of(await client.post(COMPLETIONS, json=completion("x" * 60, max_tokens=41)), 400)
        assert "ask for 40 at most" in error["message"]
        ask: dict[str, Any] = {"model": MODEL, "input": "x" * 60}
        for path, body, field in (
            (COMPLETIONS, completion("x" * 60), "max_tokens"), (CHAT, chat("x" * 60), "max_tokens"),
            (CHAT, chat("x" * 60, max_tokens=1), "max_completion_tokens"), (RESPONSES, ask, "max_output_tokens"),
        ):  # fmt: skip
            error = error_of(await client.post(path, json={**body, field: 90}), 400)
            assert (error["param"], error["code"]) == (field, "context_length_exceeded")
            assert error["message"].startswith(f"{field}: the prompt's ")
        assert (await client.post(COMPLETIONS, json=completion("x" * 60, max_tokens=40))).status_code == 200


@on_loop
async def test_a_model_without_a_chat_template_and_one_that_refuses_cannot_process_the_request() -> None:
    async with http_server(Repeater(), tokenizer=byte_tokenizer(128)) as client:
        assert "/v1/completions" in error_of(await client.post(CHAT, json=chat()), 422)["message"]
        assert (await client.post(COMPLETIONS, json=completion(), timeout=5)).status_code == 200
    async with http_server(Repeater()) as client:
        messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
        error = error_of(await client.post(CHAT, json={"model": MODEL, "messages": messages}), 422)
        assert "a system message comes first" in error["message"]
        assert error["param"] == "messages"
        error = error_of(await client.post(RESPONSES, json={"model": MODEL, "input": messages}), 422)
        assert (error["param"], error["code"]) == ("input", "chat_template")
        assert error["message"].startswith("the model's chat template refuses the messages")


@on_loop
async def test_a_body_that_is_too_large_is_refused_also_without_a_declared_length() -> None:
    async with http_server(Repeater(), limits=Limits(body_bytes=10_000)) as client:
        body = json.dumps(chat("x" * 10_000)).encode()

        async def chunks() -> Any:
            yield body[:5000]
            yield body[5000:]

        for content in (body, chunks()):
            response = await client.post(CHAT, content=content, headers={"content-type": "application/json"})
            assert error_of(response, 413)["code"] == "body_too_large"
        assert (await client.post(CHAT, json=chat())).status_code == 200


@on_loop
async def test_a_body_that_does_not_come_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.2)
    async with http_server(Repeater()) as client:
        async with asyncio.timeout(20):
            reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: 9\r\n\r\n{{".encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 408")
            writer.close()


@on_loop
async def test_an_answer_that_takes_too_long_is_a_timeout_and_ends_its_generation() -> None:
    generator = Repeater(steps=asyncio.Semaphore(0))
    async with http_server(generator, limits=Limits(request_seconds=0.2)) as client:
        for body in (chat(), chat(stream=True)):
            assert error_of(await client.post(CHAT, json=body), 408)["type"] == "timeout_error"
            await generator.until(running=0)
        assert generator.steps is not None
        generator.steps.release()
        *chunks, error = await events(client, CHAT, chat())
        assert [chunk["choices"][0]["delta"]["content"] for chunk in chunks] == ["", "H"]
        assert error["error"]["type"] == "timeout_error", "a stream that has begun ends with the error, not with [DONE]"
        await generator.until(running=0)


FAILURES = [
    (OverloadedError(2.3), 429, "3", "overloaded"),
    (NoHostError(1, (4, 8)), 503, "5", "no_host"),
    (MixedHostsError(0, (0, 4), [{"exact-1/fp32"}, {"exact-1/int8"}]), 503, "5", "mixed_hosts"),
    (GenerationFailedError("the host of stage 1 failed, and no other has it"), 503, "5", "unavailable"),
    (PeerLostError("peer", "its stream ended"), 503, "5", "unavailable"),
    (PromptTooLongError("the prompt has too many tokens"), 400, None, "context_length_exceeded"),
    (RuntimeError("a secret"), 500, None, "internal_error"),
]


@pytest.mark.parametrize(("failure", "status", "retry", "code"), FAILURES)
@on_loop
async def test_a_generators_failure_has_a_status_of_its_own(
    failure: Exception, status: int, retry: str | None, code: str
) -> None:
    generator = Repeater(failure=failure)
    async with http_server(generator) as client:
        for body in (chat(), chat(stream=True), chat(n=3)):
            response = await client.post(CHAT, json=body)
            error = error_of(response, status)
            assert (error["code"], response.headers.get("retry-after")) == (code, retry)
            assert "secret" not in error["message"]
        generator.fails_after = 2
        *chunks, last = await events(client, CHAT, chat())
        assert len(chunks) == 3
        assert last["error"]["code"] == code
    assert generator.running == 0


@on_loop
async def test_a_stage_without_a_host_is_named_with_its_blocks() -> None:
    async with http_server(Repeater(failure=NoHostError(1, (4, 8)))) as client:
        assert "stage 1 (blocks 4 to 7)" in error_of(await client.post(CHAT, json=chat()), 503)["message"]


@on_loop
async def test_a_stream_that_waits_for_its_first_token_begins_with_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "HEARTBEAT_SECONDS", 0.05)
    generator = Repeater(b"a", steps=asyncio.Semaphore(0))
    async with http_server(generator) as client, client.stream("POST", CHAT, json=chat(stream=True)) as response:
        lines = response.aiter_lines()
        assert [await anext(lines) for _ in range(4)] == [": still here", ""] * 2
        assert generator.steps is not None
        generator.steps.release()
        generator.steps.release()
        rest = [line async for line in lines]
    assert rest[-2:] == ["data: [DONE]", ""]


@on_loop
async def test_long_and_unprintable_names_are_told_in_one_short_line() -> None:
    async with http_server(Repeater()) as client:
        for name in ("x" * 5000, "a\nb", "\u202e"):
            error = error_of(await client.post(CHAT, json={**chat(), name: 1}), 400)
            assert error["message"].isprintable()
            assert len(error["message"]) < 200
        error_of(await client.post(CHAT, json=chat(model="m\n" * 100)), 404)
