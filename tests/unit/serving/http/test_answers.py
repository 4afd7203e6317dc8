"""Answers have OpenAI's form, whole and as streams, and their numbers are right."""

import asyncio
from typing import Any

import msgspec
import pytest

from p2ptrain.errors import ConfigError
from p2ptrain.serving.http.schemas import ChatAnswer, ChatChunk, CompletionAnswer, ModelList
from p2ptrain.serving.sampling import default_sampling
from tests.support.coroutines import on_loop
from tests.support.generators import (
    CHAT,
    COMPLETIONS,
    END,
    MODEL,
    Repeater,
    chat,
    completion,
    data_of,
    events,
    http_server,
)

GREETING = "Grüße, 世界 😀!"


def greeter() -> Repeater:
    return Repeater(GREETING.encode())


def usage(prompt: int, completion: int, cached: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip


def told(chunks: list[Any], index: int = 0) -> str:
    """Return the text of one choice of a chat's stream."""
    deltas = [each["delta"] for chunk in chunks for each in chunk["choices"] if each["index"] == index]
    return "".join(delta.get("content", "") for delta in deltas)


@on_loop
async def test_a_chat_is_answered_whole() -> None:
    async with http_server(greeter()) as client:
        response = await client.post(CHAT, json=chat())
    answer = msgspec.convert(response.json(), ChatAnswer, strict=True)
    [choice] = answer.choices
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", GREETING)
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert (answer.model, answer.system_fingerprint) == (MODEL, "7-abcdef")
    num_prompt, num_answer = len("user: Hi\nassistant: "), len(GREETING.encode()) + 1
    assert response.json()["usage"] == usage(num_prompt, num_answer)
    assert "token_ids" not in response.text
    assert response.headers["x-request-id"].startswith("req-")


@on_loop
async def test_a_stream_has_the_role_then_whole_characters_then_the_reason_and_the_end() -> None:
    async with http_server(greeter()) as client:
        *chunks, end = await events(client, CHAT, chat())
    assert end == "[DONE]"
    for chunk in chunks:
        msgspec.convert(chunk, ChatChunk, strict=True)
        assert "usage" not in chunk
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [delta["content"] for delta in deltas[1:-1]] == list(GREETING)
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1


@on_loop
async def test_each_token_is_sent_when_it_is_drawn() -> None:
    steps = asyncio.Semaphore(1)
    generator = Repeater(b"abc", steps=steps)
    async with (
        http_server(generator) as client,
        asyncio.timeout(10),
        client.stream("POST", CHAT, json=chat(stream=True)) as response,
    ):
        chunks = data_of(response)
        assert (await anext(chunks))["choices"][0]["delta"]["role"] == "assistant"
        for expected in "abc":
            assert (await anext(chunks))["choices"][0]["delta"]["content"] == expected
            steps.release()
        assert [chunk async for chunk in chunks][-1] == "[DONE]"


@on_loop
async def test_usage_comes_last_if_it_is_asked_for() -> None:
    async with http_server(Repeater(b"abc")) as client:
        for path, body in ((CHAT, chat(n=2)), (COMPLETIONS, completion(["a", "bc"], n=2))):
            *chunks, last, end = await events(client, path, {**body, "stream_options": {"include_usage": True}})
            assert end == "[DONE]"
            assert {chunk["usage"] for chunk in chunks} == {None}
            num_prompt = 20 if path == CHAT else 3
            num_answers = 2 * 4 if path == CHAT else 4 * 4
            assert last["choices"] == []
            assert last["usage"] == usage(num_prompt, num_answers)


@on_loop
async def test_cached_tokens_of_a_prompt_count_once() -> None:
    async with http_server(Repeater(b"abc", cached=2)) as client:
        answer = (await client.post(COMPLETIONS, json=completion(["abcd", "bcd"], n=2))).json()
        response = (await client.post("/v1/responses", json={"model": MODEL, "input": "Hi"})).json()
    assert answer["usage"] == usage(7, 16, 4)
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": 2}


@on_loop
async def test_several_choices_are_generated_at_once_each_with_a_seed_of_its_own() -> None:
    generator = Repeater(b"abc", steps=asyncio.Semaphore(0))
    async with http_server(generator) as client, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(client.post(CHAT, json=chat(n=3, seed=5)))
        await generator.until(running=3)
        for _ in range(100):
            assert generator.steps is not None
            generator.steps.release()
        answer = (await asked).json()
        chunks = await events(client, CHAT, chat(n=3, seed=-1))
    assert [(each["index"], each["message"]["content"]) for each in answer["choices"]] == [(i, "abc") for i in range(3)]
    assert [told(chunks[:-1], index) for index in range(3)] == ["abc"] * 3
    assert sorted(sampling.seed for _, sampling, _, _ in generator.opened[:3]) == [5, 6, 7]
    assert all(0 <= sampling.seed < 1 << 63 for _, sampling, _, _ in generator.opened)


@on_loop
async def test_settings_reach_the_generator_and_what_is_left_out_has_openais_default() -> None:
    generator = Repeater(b"a")
    settings: dict[str, Any] = {
        "temperature": 0, "top_p": 0.5, "top_k": 7, "seed": 3, "frequency_penalty": -2, "presence_penalty": 1.5,
        "repetition_penalty": 1.1, "logit_bias": {"65": -100, "3": 1}, "logprobs": True, "top_logprobs": 4,
    }  # fmt: skip
    async with http_server(generator) as client:
        for body in (chat(max_completion_tokens=9, **settings), chat(), chat(max_tokens=8), completion([65, 66])):
            path = CHAT if "messages" in body else COMPLETIONS
            assert (await client.post(path, json=body)).status_code == 200
    first, second, third, fourth = generator.opened
    expected = {
        **settings,
        "grammar": None,
        "logit_bias": ((3, 1.0), (65, -100.0)),
        "logprobs": 4,
        "want_logprob": True,
    }
    del expected["top_logprobs"]
    assert msgspec.structs.asdict(first[1]) == expected
    assert (first[2], third[2]) == (9, 8)
    assert second[2] == min(512, generator.context - len(second[0]))
    assert (second[1].temperature, second[1].top_p, second[1].want_logprob) == (1.0, 1.0, False)
    assert fourth[0] == [65, 66]


@on_loop
async def test_the_models_own_settings_count_where_a_request_names_none() -> None:
    generator = Repeater(b"a")
    own = default_sampling({"do_sample": True, "temperature": 0.2, "top_p": 0.9, "max_length": 20})
    async with http_server(generator, sampling=own) as client:
        await client.post(CHAT, json=chat())
        await client.post(COMPLETIONS, json=completion(temperature=None, top_p=1, top_k=5))
        told = (await client.post("/v1/responses", json={"model": MODEL, "input": "Hi", "temperature": 1.5})).json()
    found = [(each.temperature, each.top_p, each.top_k) for _, each, _, _ in generator.opened]
    assert found == [(0.2, 0.9, 0), (0.2, 1.0, 5), (1.5, 0.9, 0)]
    assert (told["temperature"], told["top_p"]) == (1.5, 0.9)
    with pytest.raises(ConfigError, match=r"generation_config\.json: temperature"):
        default_sampling({"temperature": 3.0})


@on_loop
async def test_a_request_that_names_no_length_waits_until_the_context_is_known() -> None:
    generator = Repeater(context=0)
    async with http_server(generator) as client, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(client.post(COMPLETIONS, json=completion()))
        await asyncio.sleep(0.2)
        assert not generator.opened
        generator.context = 40
        assert (await asked).status_code == 200
    assert [most for _, _, most, _ in generator.opened] == [38]


@on_loop
async def test_prompts_may_be_texts_or_token_ids_one_or_several() -> None:
    generator = Repeater(b"x")
    async with http_server(generator) as client:
        for prompt in ("ab", ["ab"], [97, 98], [[97, 98]]):
            answer = (await client.post(COMPLETIONS, json=completion(prompt, echo=True))).json()
            msgspec.convert(answer, CompletionAnswer, strict=True)
            assert [each["text"] for each in answer["choices"]] == ["abx"]
        answer = (await client.post(COMPLETIONS, json=completion(["a", [98, 99]], n=2, echo=True))).json()
    assert [(each["index"], each["text"]) for each in answer["choices"]] == [
        (0, "ax"), (1, "ax"), (2, "bcx"), (3, "bcx"),
    ]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@on_loop
async def test_a_stop_string_across_tokens_ends_the_answer_before_it_and_the_generation(path: str) -> None:
    generator = Repeater(b"one two three", steps=asyncio.Semaphore(7))
    body = chat() if path == CHAT else completion()
    async with http_server(generator) as client:
        for stop in (["o th", "two"], "two"):
            generator.steps = asyncio.Semaphore(7)  # More would block: the answer ends without them.
            answer = (await client.post(path, json={**body, "stop": stop})).json()
            [choice] = answer["choices"]
            assert (choice["message"]["content"] if path == CHAT else choice["text"]) == "one "
            assert choice["finish_reason"] == "stop"
            assert answer["usage"]["completion_tokens"] == 7
            generator.steps = asyncio.Semaphore(7)
            *chunks, _ = await events(client, path, {**body, "stop": stop})
            texts = [told([chunk]) if path == CHAT else chunk["choices"][0]["text"] for chunk in chunks]
            assert "".join(texts) == "one "
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert generator.running == 0


@on_loop
async def test_text_that_might_have_become_a_stop_string_comes_at_the_end() -> None:
    async with http_server(Repeater(b"a <|en")) as client:
        *chunks, _ = await events(client, CHAT, chat(stop=["<|end|>"]))
        assert told(chunks) == "a <|en"
        answer = (await client.post(CHAT, json=chat(stop=["<|end|>"]))).json()
        assert answer["choices"][0]["message"]["content"] == "a <|en"


@on_loop
async def test_the_length_ends_an_answer_and_a_character_that_it_cuts_is_left_out() -> None:
    async with http_server(greeter()) as client:
        for number, text in ((1, "G"), (3, "Gr"), (4, "Grü")):
            [choice] = (await client.post(CHAT, json=chat(max_tokens=number))).json()["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == (text, "length")


@on_loop
async def test_the_end_token_can_be_ignored_or_be_another_one() -> None:
    async with http_server(Repeater(b"ab")) as client:
        [choice] = (await client.post(CHAT, json=chat(ignore_eos=True, return_token_ids=True))).json()["choices"]
        assert choice["token_ids"] == [97, 98, END]
    async with http_server(Repeater(b"ab"), end_ids=[98]) as client:
        [choice] = (await client.post(CHAT, json=chat(return_token_ids=True))).json()["choices"]
        assert (choice["token_ids"], choice["message"]["content"], choice["finish_reason"]) == ([97, 98], "a", "stop")


@on_loop
async def test_log_probabilities_of_a_chat_name_tokens_and_their_bytes() -> None:
    asked = chat(logprobs=True, top_logprobs=2, max_tokens=3)
    async with http_server(Repeater("aü".encode())) as client:
        whole = (await client.post(CHAT, json=asked)).json()["choices"][0]["logprobs"]
        *chunks, _ = await events(client, CHAT, asked)
    assert [each["token"] for each in whole["content"]] == ["a", "bytes:\\xc3", "bytes:\\xbc"]
    assert whole["content"][1] == {
        "token": "bytes:\\xc3", "logprob": -0.5, "bytes": [0xC3],
        "top_logprobs": [
            {"token": "bytes:\\xc3", "logprob": -0.5, "bytes": [0xC3]},
            {"token": "bytes:\\xc4", "logprob": -1.5, "bytes": [0xC4]},
        ],
    }  # fmt: skip
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [token for part in parts if part for token in part["content"]] == whole["content"]


@on_loop
async def test_log_probabilities_of_a_completion_have_the_older_form() -> None:
    asked = completion(logprobs=2, max_tokens=4)
    async with http_server(Repeater("aüb".encode())) as client:
        whole = (await client.post(COMPLETIONS, json=asked)).json()["choices"][0]["logprobs"]
        *chunks, _ = await events(client, COMPLETIONS, asked)
        bare = (await client.post(COMPLETIONS, json=completion(logprobs=0, max_tokens=1))).json()["choices"][0]
    assert whole["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xbc", "b"]
    assert whole["token_logprobs"] == [-0.5] * 4
    assert whole["text_offset"] == [0, 1, 2, 2]
    assert whole["top_logprobs"][0] == {"a": -0.5, "b": -1.5}
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [each for part in parts if part for each in part["text_offset"]] == whole["text_offset"]
    assert bare["logprobs"] == {
        "tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": None, "text_offset": [0],
    }  # fmt: skip


@on_loop
async def test_token_ids_come_with_answers_and_chunks_if_they_are_asked_for() -> None:
    async with http_server(Repeater(b"ab")) as client:
        whole = (await client.post(CHAT, json=chat(return_token_ids=True))).json()
        *chunks, _ = await events(client, CHAT, chat(return_token_ids=True))
        legacy = (await client.post(COMPLETIONS, json=completion([65], n=2, return_token_ids=True))).json()
        *pieces, _ = await events(client, COMPLETIONS, completion([65], return_token_ids=True))
    assert whole["prompt_token_ids"] == list(b"user: Hi\nassistant: ") == chunks[0]["prompt_token_ids"]
    assert whole["choices"][0]["token_ids"] == [97, 98, END]
    assert [each for chunk in chunks for each in chunk["choices"][0].get("token_ids", [])] == [97, 98, END]
    assert [(each["prompt_token_ids"], each["token_ids"]) for each in legacy["choices"]] == [([65], [97, 98, END])] * 2
    assert [piece["choices"][0].get("prompt_token_ids") for piece in pieces][:2] == [[65], None]


@on_loop
async def test_models_are_listed() -> None:
    async with http_server(greeter()) as client:
        [model] = msgspec.convert((await client.get("/v1/models")).json(), ModelList, strict=True).data
        assert (model.id, model.max_model_len) == (MODEL, 512)
        assert (await client.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL


@on_loop
async def test_parts_of_messages_and_neutral_fields_are_taken_as_what_they_are() -> None:
    generator = Repeater(b"x")
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "!"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts, "name": None}]
    neutral: dict[str, Any] = {
        "tools": None, "tool_choice": "auto", "response_format": {"type": "text"}, "store": False, "metadata": {},
        "service_tier": "auto", "stop": None, "user": "ada", "parallel_tool_calls": True, "functions": [],
    }  # fmt: skip
    async with http_server(generator) as client:
        response = await client.post(CHAT, json={"model": MODEL, "messages": messages, **neutral})
        assert response.status_code == 200, response.text
    assert bytes(generator.opened[0][0]) == b"system: Be brief.\nuser: Hi!\nassistant: "
