"""Answers in a given form, by OpenAI's own client: whatever a small random model says, it is JSON or a tool call."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from p2ptrain.manifest import ModelSpec
from tests.support.coroutines import on_loop
from tests.support.exact import kernels
from tests.support.generators import TEMPLATE, Repeater, SmallModel, openai_client, tokenizer
from tests.support.tools import needed

pytestmark = needed("" if kernels() else "there is no library of exact kernels", "kernels")
SPEC = ModelSpec(layers=2, hidden=32, heads=4, kv_heads=2, intermediate=48, vocabulary=257, context=2048)
ASK: dict[str, Any] = {"model": "local", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 900}
CITY = {"type": "object", "properties": {"city": {"enum": ["Köln", "Ulm"]}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]
FLAT_TOOLS: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]


class Colour(Enum):
    RED = "red"
    GREEN = "green"


class Leaf(BaseModel):
    colour: Colour
    size: int = Field(ge=-9, le=99)


class Tree(BaseModel):
    leaves: list[Leaf] = Field(max_length=3)
    best: Leaf | None
    is_old: bool


def with_tools() -> Any:
    """Return the tokenizer with a template that shows tools, calls and their results."""
    made = tokenizer()
    call = "[{{ call.function.name }} {{ call.function.arguments.city }}]"
    calls = "{% for call in message.tool_calls or [] %}" + call + "{% endfor %}"
    made.chat_template = "{% for tool in tools or [] %}{{ tool.function.name }}; {% endfor %}" + TEMPLATE.replace(
        "{{ message.content }}", calls + "{{ message.content }}"
    )
    return made


@asynccontextmanager
async def small_model() -> AsyncIterator[AsyncOpenAI]:
    """Yield a client of a server with a random model of 257 tokens."""
    made = with_tools()
    generator = SmallModel(SPEC, made)
    async with openai_client(generator, tokenizer=made) as client:
        yield client
    assert not generator.running


@on_loop
async def test_parse_gives_objects_of_a_class_and_equal_seeds_equal_ones() -> None:
    async with small_model() as client:
        found = []
        for seed in (1, 2, 3, 1):
            answer = await client.chat.completions.parse(**ASK, seed=seed, temperature=1.5, response_format=Tree)
            tree = answer.choices[0].message.parsed
            assert isinstance(tree, Tree)
            assert answer.choices[0].finish_reason == "stop"
            found.append(answer.choices[0].message.content)
        assert found[0] == found[3]
        assert len(set(found)) > 1
        async with client.chat.completions.stream(**ASK, response_format=Tree, n=2) as stream:
            final = await stream.get_final_completion()
        assert all(isinstance(choice.message.parsed, Tree) for choice in final.choices)


@on_loop
async def test_a_json_object_is_one_if_its_length_suffices() -> None:
    async with small_model() as client:
        number = 0
        for seed in range(8):
            answer = await client.chat.completions.create(**ASK, seed=seed, response_format={"type": "json_object"})
            if answer.choices[0].finish_reason == "stop":
                number += 1
                assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
        assert number


@on_loop
async def test_schemas_that_null_and_numbers_are_part_of_stay_as_they_are() -> None:
    async with small_model() as client:
        for schema, value in (
            ({"const": None}, None),
            ({"enum": [2.5]}, 2.5),
            ({"const": {"a": [None]}}, {"a": [None]}),
        ):
            form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
            answer = await client.chat.completions.create(**ASK, response_format=form)
            assert json.loads(answer.choices[0].message.content or "") == value


@on_loop
async def test_a_call_that_the_model_makes_is_told_and_its_result_goes_back() -> None:
    said = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    generator = Repeater(said.encode())
    async with openai_client(generator, tokenizer=with_tools()) as client:
        ask: dict[str, Any] = {"model": generator.model, "messages": [{"role": "user", "content": "Rain?"}]}
        answer = await client.chat.completions.create(**ask, tools=TOOLS)
        message = answer.choices[0].message
        assert (answer.choices[0].finish_reason, message.content) == ("tool_calls", "I look.\n")
        assert message.tool_calls is not None
        stream = await client.chat.completions.create(**ask, tools=TOOLS, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        assert "".join(each.delta.content or "" for each in chunks) == "I look.\n"
        assert [call.function.name for each in chunks for call in each.delta.tool_calls or () if call.function] == [
            "weather"
        ]
        assert chunks[-1].finish_reason == "tool_calls"
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"}
        history: Any = [*ask["messages"], message, result]
        plain = await client.chat.completions.create(
            model=generator.model, messages=history, tools=TOOLS, tool_choice="none", max_tokens=5
        )
        assert plain.choices[0].message.content == "I loo"
        free = await client.chat.completions.create(**ask, max_tokens=60)
        assert free.choices[0].message.content == said[:60]
    prompts = [bytes(ids).decode() for ids, *_ in generator.opened]
    assert prompts[0].startswith("weather; now; user: Rain?")
    assert prompts[2].startswith("user: Rain?\nassistant: [weather Ulm]I look.\n\ntool: sun")


@pytest.mark.parametrize("is_stream", [False, True])
@on_loop
async def test_an_answer_that_may_have_one_call_ends_with_it(is_stream: bool) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>\n'
    generator = Repeater(("I look." + call % "Ulm" + call % "Köln" + "Soon.").encode())
    async with openai_client(generator, tokenizer=with_tools()) as client:
        ask: dict[str, Any] = {"model": generator.model, "messages": [{"role": "user", "content": "Rain?"}]}
        options: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False}
        if is_stream:
            async with client.chat.completions.stream(**ask, **options) as stream:
                answer: Any = await stream.get_final_completion()
        else:
            answer = await client.chat.completions.create(**ask, **options)
        (choice,) = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
        assert [json.loads(each.function.arguments) for each in choice.message.tool_calls] == [{"city": "Ulm"}]
        await generator.until(running=0)


@on_loop
async def test_responses_parse_and_stream_objects_of_a_class() -> None:
    async with small_model() as client:
        ask: dict[str, Any] = {"model": "local", "input": "Hi", "max_output_tokens": 900, "extra_body": {"seed": 1}}
        parsed = await client.responses.parse(**ask, text_format=Tree)
        assert isinstance(parsed.output_parsed, Tree)
        async with client.responses.stream(**ask, text_format=Tree) as stream:
            final = await stream.get_final_response()
        assert (final.output_parsed, final.output_text) == (parsed.output_parsed, parsed.output_text)
        form: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"enum": [None, 2.5]}}}
        answer = await client.responses.create(**ask, text=form)
        assert json.loads(answer.output_text) in (None, 2.5)
        assert answer.text is not None
        assert answer.text.to_dict()["format"] == {**form["format"], "description": "", "strict": True}
        objects = [
            await client.responses.create(
                **{**ask, "extra_body": {"seed": seed}}, text={"format": {"type": "json_object"}}
            )
            for seed in range(8)
        ]
        whole = [json.loads(each.output_text) for each in objects if each.status == "completed"]
        assert whole
        assert all(isinstance(each, dict) for each in whole)


async def chat_calls(client: AsyncOpenAI, seed: int, is_stream: bool, **options: Any) -> list[tuple[str, str, str]]:
    """Return id, name and arguments of the calls of a chat's answer, which has no text."""
    asked = {**ASK, "seed": seed, "tools": TOOLS, **options}
    if isinstance(options["tool_choice"], dict):
        asked["tool_choice"] = {"type": "function", "function": {"name": options["tool_choice"]["name"]}}
    if is_stream:
        async with client.chat.completions.stream(**asked) as stream:
            answer: Any = await stream.get_final_completion()
    else:
        answer = await client.chat.completions.create(**asked)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert not message.content
    return [(call.id, call.function.name, call.function.arguments) for call in message.tool_calls]


async def response_calls(client: AsyncOpenAI, seed: int, is_stream: bool, **options: Any) -> list[tuple[str, str, str]]:
    """Return the same of a response."""
    asked = {"model": "local", "input": "Hi", "max_output_tokens": 900, "extra_body": {"seed": seed},
             "tools": FLAT_TOOLS, **options}  # fmt: skip
    if is_stream:
        async with client.responses.stream(**asked) as stream:
            answer: Any = await stream.get_final_response()
    else:
        answer = await client.responses.create(**asked)
    assert answer.status == "completed"
    assert [item.type for item in answer.output] == ["function_call"] * len(answer.output)
    return [(item.call_id, item.name, item.arguments) for item in answer.output]


@pytest.mark.parametrize("calls_of", [chat_calls, response_calls])
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@on_loop
async def test_tools_that_are_required_or_named_are_called_with_arguments_that_fit(
    is_stream: bool, calls_of: Callable[..., Awaitable[list[tuple[str, str, str]]]]
) -> None:
    named = {"type": "function", "name": "weather"}
    async with small_model() as client:
        for seed, choice, parallel in ((1, "required", True), (2, "required", False), (3, named, True)):
            calls = await calls_of(client, seed, is_stream, tool_choice=choice, parallel_tool_calls=parallel)
            assert len(calls) == 1 or (calls and parallel and choice == "required")
            assert len({id for id, _, _ in calls}) == len(calls)
            for _, name, text in calls:
                assert name in (("weather",) if choice == named else ("weather", "now"))
                assert json.loads(text) == {} if name == "now" else json.loads(text)["city"] in ("Köln", "Ulm")


@on_loop
async def test_a_response_with_text_and_calls_streams_what_it_is_whole_and_goes_on() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>\n'
    generator = Repeater(("I look." + call % "Ulm" + call % "Köln" + "Soon.").encode())
    async with openai_client(generator, tokenizer=with_tools()) as client:
        ask: dict[str, Any] = {"model": generator.model, "tools": FLAT_TOOLS}
        whole = await client.responses.create(**ask, input="Rain?")
        kinds = ["message", "function_call", "function_call", "message"]
        assert [item.type for item in whole.output] == kinds
        assert whole.output_text == "I look.Soon."
        async with client.responses.stream(**ask, input="Rain?") as stream:
            events = [event async for event in stream]
            final: Any = await stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [item.id for item in done] == [item.id for item in final.output]
        assert [item.type for item in done] == kinds
        assert [event.output_index for event in events if event.type == "response.output_item.added"] == [0, 1, 2, 3]
        arguments = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
        assert list(map(json.loads, arguments)) == [{"city": "Ulm"}, {"city": "Köln"}]
        cut = await client.responses.create(**ask, input="Rain?", max_output_tokens=80)
        assert (cut.status, cut.output[-1].type) == ("incomplete", "message")
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "sun"}
            for item in whole.output
            if item.type == "function_call"
        ]
        history: Any = [{"role": "user", "content": "Rain?"}, *whole.output[:3], *results]
        plain = await client.responses.create(**ask, input=history, tool_choice="none", max_output_tokens=5)
        assert plain.output_text == "I loo"
    prompts = [bytes(ids).decode() for ids, *_ in generator.opened]
    assert prompts[0].startswith("weather; now; user: Rain?")
    assert prompts[3] == "user: Rain?\nassistant: [weather Ulm][weather Köln]I look.\ntool: sun\ntool: sun\nassistant: "


@on_loop
async def test_a_model_without_the_means_says_so() -> None:
    async with openai_client(Repeater()) as client:
        ask: dict[str, Any] = {"model": Repeater.model, "messages": [{"role": "user", "content": "Hi"}]}
        with pytest.raises(openai.UnprocessableEntityError, match="takes no tools"):
            await client.chat.completions.create(**ask, tools=TOOLS)
