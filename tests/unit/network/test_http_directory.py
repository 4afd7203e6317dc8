"""The HTTP directory, against the example's server and against servers that lie, fail, or are something else."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import msgpack
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from examples.loops import http_directory as example
from p2ptrain.errors import ConfigError
from p2ptrain.network import directory as module
from p2ptrain.network import http_directory
from p2ptrain.network.factory import DirectoryOptions, start_directory
from p2ptrain.network.http_directory import HttpDirectory
from p2ptrain.network.http_server import listen, serving, url_of
from p2ptrain.network.identity import Identity
from p2ptrain.network.records.record import MAX_RECORD_BYTES, peers_key, seal_record, shard_of
from p2ptrain.network.transport import Transport
from p2ptrain.runtime import Runtime
from tests.support.coroutines import on_loop
from tests.support.processes.daemons import free_port

SWARM, OTHER_SWARM = b"s" * 32, b"o" * 32
ME = Identity.ephemeral()
OTHER = next(each for each in iter(Identity.ephemeral, None) if shard_of(each.peer_id) == shard_of(ME.peer_id))
KEY, OTHER_KEY = peers_key(SWARM, shard_of(ME.peer_id)), peers_key(OTHER_SWARM, shard_of(ME.peer_id))


def sealed(
    identity: Identity = ME, sequence: int = 1, seconds: float = 60.0, swarm: bytes = SWARM
) -> tuple[bytes, float]:
    expires_at = time.time() + seconds
    return seal_record(swarm, {"sequence": sequence}, sequence, expires_at, identity), expires_at


async def start(url: str, runtime: Runtime | None = None) -> HttpDirectory:
    runtime = runtime or Runtime(random.Random(0))
    found = await start_directory(DirectoryOptions(url, cast(Transport, None), SWARM, ME, runtime))
    assert isinstance(found, HttpDirectory)
    return found


@contextlib.asynccontextmanager
async def at_server(app: Starlette) -> AsyncIterator[HttpDirectory]:
    """A directory at a server on loopback."""
    listener = listen("127.0.0.1", 0, "port")
    async with serving(app, listener):
        directory = await start(url_of(listener))
        try:
            yield directory
        finally:
            await directory.close()
            await directory.close()


def answering(*answers: object) -> Starlette:
    """A server that answers with each of these in turn, the last one again and again; bytes as they are."""
    left = list(answers)

    async def answer(request: Request) -> Response:
        found = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(found, Response):
            return found
        return Response(found if isinstance(found, bytes) else msgpack.packb(found))

    return Starlette(routes=[Route("/{key:path}", answer, methods=["GET", "POST"])])


def holding(*records: bytes) -> dict[str, Any]:
    return {"now": time.time(), "records": list(records)}


async def publish(directory: HttpDirectory, value: bytes, expires_at: float = 0.0) -> bool:
    return await directory.publish(KEY, ME.peer_id, value, expires_at, 10)


@on_loop
async def test_what_is_published_is_found_the_newest_of_each_peer_until_it_expires() -> None:
    async with at_server(example.make_app()) as directory:
        assert await directory.look_up(KEY, 10) == {}
        first, second, other = sealed(seconds=30), sealed(sequence=2, seconds=31), sealed(OTHER, seconds=1.0)
        for value, expires_at in (second, first, other):
            assert await publish(directory, value, expires_at)
        found = await directory.look_up(KEY, 10)
        assert found is not None
        assert {peer: (entry.value, entry.expires_at) for peer, entry in found.items()} == {
            ME.peer_id: second,
            OTHER.peer_id: other,
        }
        await asyncio.sleep(1.0)
        assert set(await directory.look_up(KEY, 10) or ()) == {ME.peer_id}
        assert await directory.look_up(OTHER_KEY, 10) == {}


@pytest.mark.parametrize(
    "value",
    [b"", b"garbage", bytes(20_000), sealed(swarm=OTHER_SWARM)[0], sealed(seconds=3600)[0], sealed()[0][:-1] + b"?"],
    ids=["empty", "garbage", "too large", "of another swarm", "for too long", "forged"],
)
@on_loop
async def test_what_no_peer_of_the_swarm_signed_is_neither_taken_nor_believed(value: bytes) -> None:
    async with at_server(example.make_app()) as directory:
        assert not await publish(directory, value)
        assert await directory.look_up(KEY, 10) == {}
    good = sealed(OTHER)
    async with at_server(answering(holding(), holding(value, good[0], sealed(seconds=-1)[0]))) as directory:
        found = await directory.look_up(KEY, 10)
        if len(value) <= MAX_RECORD_BYTES:
            assert found is not None
            assert set(found) == {OTHER.peer_id}
            assert directory.guard.refused == 1
        else:
            assert found is None


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xc1",
        b"<html></html>",
        [1, 2],
        {"now": 1.0},
        {"now": "noon", "records": []},
        {"now": float("nan"), "records": []},
        {"now": 1.0, "records": ["text"]},
        {"now": 1.0, "records": [b""] * 5000},
        b"\x91" * 100_000,
        Response(status_code=404),
        Response("go away", status_code=403),
    ],
)
@on_loop
async def test_what_is_no_directory_is_refused_at_the_start_and_is_no_answer_later(answer: object) -> None:
    with pytest.raises(ConfigError, match=r"http://127.*is no directory.*correct network\.directory"):
        async with at_server(answering(answer)):
            pass
    async with at_server(answering(holding(), answer)) as directory:
        assert await directory.look_up(KEY, 10) is None


@pytest.mark.parametrize("answer", [Response(status_code=503), RedirectResponse("http://192.0.2.1/")])
@on_loop
async def test_a_server_that_fails_is_asked_again(answer: Response, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with at_server(answering(answer, answer, holding(sealed()[0]))) as directory:
        assert await directory.look_up(KEY, 10) is None
        assert set(await directory.look_up(KEY, 10) or ()) == {ME.peer_id}
    said = [record.message for record in caplog.records if record.name == http_directory.__name__]
    assert len(said) == 2
    assert "does not answer" in said[0]
    assert "answers again" in said[1]


@on_loop
async def test_a_larger_answer_than_any_swarm_s_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_directory, "MAX_ANSWER_BYTES", 1000)
    async with at_server(answering(holding(), holding(sealed()[0]), bytes(1001))) as directory:
        assert set(await directory.look_up(KEY, 10) or ()) == {ME.peer_id}
        assert await directory.look_up(KEY, 10) is None


@on_loop
async def test_operations_end_by_their_deadline_when_the_server_hangs_or_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_directory, "START_SECONDS", 0.2)
    with listen("127.0.0.1", 0, "port") as silent:
        for url in (url_of(silent), f"http://127.0.0.1:{free_port()}/"):
            directory = await start(url)
            began = time.monotonic()
            assert await directory.look_up(KEY, 0.2) is None
            assert not await directory.publish(KEY, ME.peer_id, *sealed(), 0.2)
            assert time.monotonic() - began < 20
            assert directory.clock_skew_seconds is None
            await directory.close()


@on_loop
async def test_a_clock_off_by_an_hour_is_measured_by_the_server_s() -> None:
    listener = listen("127.0.0.1", 0, "port")
    async with serving(example.make_app(), listener):
        runtime = Runtime(random.Random(0), clock=lambda: time.time() + 3600)
        directory = await start(url_of(listener), runtime)
        skew = directory.clock_skew_seconds
        assert skew is not None
        assert abs(skew - 3600) < 5
        await directory.close()


@on_loop
async def test_the_server_holds_so_much_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SUBKEYS", 1)
    monkeypatch.setattr(example, "MAX_KEYS", 1)
    async with at_server(example.make_app()) as directory:
        assert await publish(directory, sealed()[0])
        assert await publish(directory, sealed(OTHER)[0])
        assert len(await directory.look_up(KEY, 10) or ()) == 1
        assert await publish(directory, sealed(sequence=2, seconds=70)[0])
        foreign = sealed(swarm=OTHER_SWARM)
        assert not await directory.publish(OTHER_KEY, ME.peer_id, *foreign, 10)
        assert not await directory.publish(peers_key(SWARM, (shard_of(ME.peer_id) + 1) % 8), ME.peer_id, *sealed(), 10)
        assert not await directory.publish("nonsense", ME.peer_id, *sealed(), 10)
