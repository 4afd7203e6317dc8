"""Many clients, clients that leave, and a server that is full or stops: each is told quickly, and nothing is left."""

import asyncio
import time
from typing import Any

import httpx
import pytest

from p2ptrain.errors import ResourceError
from p2ptrain.network.http_server import DRAIN_SECONDS
from p2ptrain.serving.generation import Load
from p2ptrain.serving.http.app import END_SECONDS
from p2ptrain.serving.http.preparing import Limits
from p2ptrain.serving.http.serve import serving_http
from tests.support.coroutines import on_loop, on_uvloop
from tests.support.generators import (
    CHAT,
    COMPLETIONS,
    Repeater,
    chat,
    completion,
    data_of,
    error_of,
    events,
    http_server,
    tokenizer,
)

QUICK_SECONDS = 2.0
"""Bound of an answer that waits for nothing; generous, since other processes share the machine."""


async def counted(client: httpx.AsyncClient) -> dict[str, float]:
    """Return the server's metrics by name and labels."""
    lines = (await client.get("/metrics")).text.splitlines()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name.removeprefix("p2ptrain_http_"): float(value) for name, _, value in pairs}


@pytest.mark.parametrize("n", [1, 3])
@on_loop
async def test_a_client_that_leaves_cancels_all_its_generations(n: int) -> None:
    generator = Repeater(b"abc" * 100, steps=asyncio.Semaphore(0))
    async with http_server(generator) as client:
        for number, (path, body) in enumerate(((CHAT, chat(n=n)), (COMPLETIONS, completion(n=n)))):
            whole = asyncio.create_task(client.post(path, json=body))
            await generator.until(running=n)
            whole.cancel()
            await generator.until(running=0)
            before_any = asyncio.create_task(events(client, path, body))
            await generator.until(running=n)
            before_any.cancel()
            await generator.until(running=0)
            steps = generator.steps = asyncio.Semaphore(n)
            async with client.stream("POST", path, json={**body, "stream": True}) as response:
                steps.release()
                await anext(data_of(response))
                await generator.until(running=n)
            await generator.until(running=0)
            metrics = await counted(client)
            assert metrics["cancelled_requests_total"] == 3 * (number + 1)
            assert metrics[f'requests_total{{code="499",path="{path}"}}'] == 3
            assert (metrics["generations"], metrics["waiting_generations"]) == (0, 0)


@on_loop
async def test_a_client_that_reads_nothing_holds_its_generation_back_and_not_the_server() -> None:
    generator = Repeater(b"x" * 400, context=1 << 20)
    generator.reply = b"x" * 200_000
    async with http_server(generator) as client:
        body = chat(stream=True, max_tokens=200_000)
        async with client.stream("POST", CHAT, json=body) as response:
            assert response.status_code == 200
            assert (await client.get("/health")).status_code == 200
            drawn = [-1.0, 0.0]
            while drawn[-2] < drawn[-1]:
                await asyncio.sleep(0.2)
                drawn.append((await counted(client))["generated_tokens_total"])
            assert 0 < drawn[-1] < 100_000
        await generator.until(running=0)


@on_uvloop
async def test_a_hundred_clients_at_once_are_all_answered() -> None:
    generator = Repeater(b"Hello, world.")
    async with http_server(generator) as client:

        async def ask(number: int) -> Any:
            if number % 2:
                *chunks, end = await events(client, CHAT, chat(str(number)))
                assert end == "[DONE]"
                return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            return (await client.post(CHAT, json=chat(str(number)))).json()["choices"][0]["message"]["content"]

        answers = await asyncio.gather(*map(ask, range(100)))
        metrics = await counted(client)
    assert answers == ["Hello, world."] * 100
    assert generator.running == 0
    assert {bytes(ids) for ids, *_ in generator.opened} == {f"user: {i}\nassistant: ".encode() for i in range(100)}
    assert metrics[f'requests_total{{code="200",path="{CHAT}"}}'] == 100


@on_loop
async def test_a_full_server_refuses_quickly_and_takes_requests_again() -> None:
    generator = Repeater(b"a", steps=asyncio.Semaphore(0))
    async with http_server(generator, limits=Limits(generations=4)) as client, asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(client.post(CHAT, json=chat(n=2))) for _ in range(2)]
        await generator.until(running=4)
        for body in (chat(), chat(stream=True)):
            began = time.monotonic()
            response = await client.post(CHAT, json=body)
            assert error_of(response, 429)["code"] == "overloaded"
            assert response.headers["retry-after"] == "1"
            assert time.monotonic() - began < QUICK_SECONDS
        assert error_of(await client.post(CHAT, json=chat(n=5)), 429)
        assert generator.steps is not None
        for _ in range(20):
            generator.steps.release()
        assert [(await each).status_code for each in asked] == [200, 200]
        assert error_of(await client.post(CHAT, json=chat(n=5)), 400)["param"] == "n"
        assert (await client.post(CHAT, json=chat())).status_code == 200


@on_loop
async def test_a_choice_too_many_of_a_request_that_is_prepared_is_refused_as_well() -> None:
    generator = Repeater(b"a", steps=asyncio.Semaphore(0))
    async with http_server(generator, limits=Limits(generations=4)) as client, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(client.post(CHAT, json=chat(n=2)))
        await generator.until(running=2)
        error_of(await client.post(CHAT, json=chat(n=3)), 429)
        error_of(await client.post(CHAT, json=chat(n=3, stream=True)), 429)
        generator.steps = None
        first.cancel()


@on_loop
async def test_metrics_count_tokens_and_times() -> None:
    loads = (Load(64, 60, 9, 7), Load(32, 0))
    async with http_server(Repeater(b"abc", cached=7, audits={"agreed": 3}, loads=loads)) as client:
        await client.post(CHAT, json=chat(n=2))
        await client.post(CHAT, json=chat(temperature=9))
        await client.get("/some/made-up/path")
        await client.get("/v1/models/x")
        metrics = await counted(client)
    assert metrics["prompt_tokens_total"] == len("user: Hi\nassistant: ")
    assert (metrics["cached_prompt_tokens_total"], metrics["prefix_hits_total"]) == (7, 1)
    assert metrics["generated_tokens_total"] == 8
    assert metrics['audits_total{result="agreed"}'] == 3
    for name, (first, second) in zip(Load._fields, zip(*loads, strict=True), strict=True):
        assert metrics[f'hosts_{name}{{stage="0"}}'] == first
        assert metrics[f'hosts_{name}{{stage="1"}}'] == second
    assert metrics["time_to_first_token_seconds_count"] == 2
    assert metrics["time_per_output_token_seconds_count"] == 6
    for code, path in ((200, CHAT), (400, CHAT), (404, "other"), (404, "/v1/models/{model}")):
        assert metrics[f'requests_total{{code="{code}",path="{path}"}}'] == 1


@on_loop
async def test_health_is_that_of_a_probe_and_a_crowd_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from p2ptrain.serving.http import app

    generator = Repeater()
    async with http_server(generator) as client:
        answers = await asyncio.gather(*(client.get("/health") for _ in range(20)))
        assert {each.status_code for each in answers} == {200}
        assert generator.num_probes == 1
        generator.sick = ResourceError("no host serves stage 1")
        monkeypatch.setattr(app, "PROBED_SECONDS", 0.0)
        error = error_of(await client.get("/health"), 503)
        assert error["message"] == "a probe failed: no host serves stage 1"
        generator.sick = None
        assert (await client.get("/health")).json() == {"status": "ok"}
        generator.steps = asyncio.Semaphore(0)  # No token comes.
        monkeypatch.setattr(app, "PROBE_SECONDS", 0.1)
        error = error_of(await client.get("/health"), 503)
        assert error["message"] == "a probe failed: no token came within 0.1 s"
        await generator.until(running=0)


@on_loop
async def test_a_server_that_stops_ends_what_it_began_and_refuses_the_rest() -> None:
    generator, stop = Repeater(b"abc", steps=asyncio.Semaphore(1)), asyncio.Event()
    urls: asyncio.Queue[str] = asyncio.Queue()

    async def serve() -> None:
        async with serving_http(generator, tokenizer(), port=0) as (url, _):
            urls.put_nowait(url)
            await stop.wait()

    async with asyncio.TaskGroup() as tasks:
        server = tasks.create_task(serve())
        async with httpx.AsyncClient(base_url=await urls.get(), timeout=30) as client:
            asked = tasks.create_task(events(client, CHAT, chat()))
            await generator.until(running=1)
            stop.set()
            await asyncio.sleep(0)
            error_of(await client.get("/health"), 503)
            assert "stopping" in error_of(await client.post(CHAT, json=chat()), 503)["message"]
            assert not server.done()
            assert generator.steps is not None
            for _ in range(3):
                generator.steps.release()
            assert (await asked)[-1] == "[DONE]"
        async with asyncio.timeout(20):
            await server


@on_loop
async def test_what_does_not_end_in_time_is_cut_when_the_server_stops() -> None:
    generator = Repeater(b"abc", steps=asyncio.Semaphore(0))
    async with asyncio.timeout(20), httpx.AsyncClient(timeout=30) as client:
        async with serving_http(generator, tokenizer(), port=0, limits=Limits(drain_seconds=0.1)) as (url, _):
            asked = asyncio.create_task(client.post(f"{url}{CHAT[1:]}", json=chat()))
            await generator.until(running=1)
        assert generator.running == 0
        asked.cancel()


def test_a_server_that_stops_ends_before_it_is_killed() -> None:
    """Kubernetes waits 30 s, and so do some others."""
    assert Limits().drain_seconds + END_SECONDS + DRAIN_SECONDS < 30


@on_loop
async def test_a_port_that_is_taken_is_told_with_the_option() -> None:
    async with http_server(Repeater()) as client:
        opened = serving_http(Repeater(), tokenizer(), port=client.base_url.port or 0)
        with pytest.raises(ResourceError, match="choose another --port"):
            await opened.__aenter__()
