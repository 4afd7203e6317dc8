"""OpenAI's own client works with the server: answers, streams, errors, retries and cancellation."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from p2ptrain.serving.errors import OverloadedError
from p2ptrain.serving.generation import Generation
from p2ptrain.serving.sampling import Sampling
from tests.support.coroutines import on_loop
from tests.support.generators import MODEL, Repeater, Repetition, openai_client

KEY = "sk-0123456789abcdef"
MESSAGES: Any = [{"role": "user", "content": "Hi"}]


@on_loop
async def test_it_lists_models_chats_and_completes() -> None:
    async with openai_client(Repeater("Grüße!".encode())) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        answer = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, n=2, logprobs=True, top_logprobs=1
        )
        assert [choice.message.content for choice in answer.choices] == ["Grüße!"] * 2
        assert answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 2 * 9
        assert answer.system_fingerprint == "7-abcdef"
        assert answer._request_id is not None
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert logprobs.content[0].top_logprobs[0].token == "G"
        older = await client.completions.create(model=MODEL, prompt="Hi", echo=True, stop=["!"])
        assert (older.choices[0].text, older.choices[0].finish_reason) == ("HiGrüße", "stop")


@on_loop
async def test_it_streams_with_usage_and_helpers() -> None:
    async with openai_client(Repeater("Grüße!".encode())) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Grüße!"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 9
        async with client.chat.completions.stream(model=MODEL, messages=MESSAGES) as helper:
            answer = await helper.get_final_completion()
        assert answer.choices[0].message.content == "Grüße!"
        # A conversation goes on with the answer as the client keeps it, null fields included.
        message: Any = answer.choices[0].message.model_dump()
        message.pop("parsed", None)
        more = await client.chat.completions.create(model=MODEL, messages=[*MESSAGES, message, *MESSAGES])
        assert more.choices[0].message.content == "Grüße!"
        pieces = await client.completions.create(model=MODEL, prompt=[65], stream=True)
        assert "".join([piece.choices[0].text async for piece in pieces]) == "Grüße!"


class Backwards(Repeater):
    """A generator whose later choices draw before the earlier ones; each has a reply of its own."""

    @asynccontextmanager
    async def _generating(
        self, ids: list[int], sampling: Sampling, max_tokens: int, key: str
    ) -> AsyncIterator[Generation]:
        number = len(self.opened)
        async with super()._generating(ids, sampling, max_tokens, key):
            async with self.changed:
                await self.changed.wait_for(lambda: len(self.opened) - self.running == 2 - number)
            yield Repetition(replace(self, reply=b"%d of three" % number), len(ids), sampling, max_tokens)


@on_loop
async def test_its_helper_reads_several_choices_of_a_stream_whichever_comes_first() -> None:
    async with openai_client(Backwards()) as client:
        ask: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "n": 3, "logprobs": True, "top_logprobs": 1}
        stream = await client.chat.completions.create(**ask, stream=True)
        choices = [choice async for chunk in stream for choice in chunk.choices]
        assert [(choice.index, choice.delta.role) for choice in choices[:3]] == [(at, "assistant") for at in range(3)]
        assert choices[3].index == 2
    async with openai_client(Backwards()) as client, client.chat.completions.stream(**ask) as helper:
        answer = await helper.get_final_completion()
    for index, choice in enumerate(answer.choices):
        assert (choice.index, choice.message.content, choice.message.role) == (index, f"{index} of three", "assistant")
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert "".join(each.token for each in choice.logprobs.content).startswith(f"{index} of three")


@on_loop
async def test_it_gets_responses_whole_and_streamed_and_goes_on_with_them() -> None:
    generator = Repeater("Grüße!".encode())
    async with openai_client(generator) as client:
        first = await client.responses.create(model=MODEL, input="Hi", instructions="Be brief.", store=False)
        assert (first.output_text, first.status) == ("Grüße!", "completed")
        assert first.usage is not None
        assert first.usage.output_tokens == 9
        cut = await client.responses.create(model=MODEL, input="Hi", max_output_tokens=2, temperature=0)
        assert (cut.output_text, cut.status) == ("Gr", "incomplete")
        assert cut.incomplete_details is not None
        assert cut.incomplete_details.reason == "max_output_tokens"
        history: Any = [{"role": "user", "content": "Hi"}, *(item.model_dump() for item in first.output), *MESSAGES]
        async with client.responses.stream(model=MODEL, input=history) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text == "Grüße!"
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        assert kinds.count("response.output_text.delta") == 6
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await client.responses.create(model=MODEL, input="Hi", previous_response_id=first.id)
    assert bytes(generator.opened[0][0]).decode() == "system: Be brief.\nuser: Hi\nassistant: "
    assert bytes(generator.opened[2][0]).decode() == "user: Hi\nassistant: Grüße!\nuser: Hi\nassistant: "


@on_loop
async def test_it_raises_the_error_of_each_status_with_the_field(tmp_path: Path) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": MESSAGES}
    generator = Repeater()
    async with openai_client(generator) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(**{**ask, "temperature": 3})
        assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(**{**ask, "model": "gpt-4"})
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.UnprocessableEntityError):
            await client.chat.completions.create(**{**ask, "messages": [*MESSAGES, {"role": "system", "content": ""}]})
        generator.failure = OverloadedError(1.0)
        with pytest.raises(openai.RateLimitError) as busy:
            await client.chat.completions.create(**ask, stream=True)
        assert busy.value.response.headers["retry-after"] == "1"
        generator.fails_after = 1
        stream = await client.chat.completions.create(**ask, stream=True)
        with pytest.raises(openai.APIError, match="all hosts are busy"):
            [chunk async for chunk in stream]
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text(f"{KEY}\n")
    async with openai_client(Repeater(), key=KEY, keys=path) as client:
        assert (await client.chat.completions.create(**ask)).choices
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="sk-another-one-0123").chat.completions.create(**ask)


@on_loop
async def test_it_tries_again_after_the_time_that_it_is_told() -> None:
    generator = Repeater(failure=OverloadedError(0.1))
    async with openai_client(generator, max_retries=2) as client, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(client.chat.completions.create(model=MODEL, messages=MESSAGES))
        async with asyncio.timeout(30), generator.changed:
            await generator.changed.wait_for(lambda: len(generator.opened) == 1 and not generator.running)
        generator.failure = None
        assert (await asked).choices[0].message.content == "Hello, world."
    assert len(generator.opened) == 2


@on_loop
async def test_closing_its_stream_cancels_the_generation() -> None:
    generator = Repeater(b"abc", steps=asyncio.Semaphore(1))
    async with openai_client(generator) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        await anext(stream.__aiter__())
        await generator.until(running=1)
        await stream.close()
        await generator.until(running=0)
