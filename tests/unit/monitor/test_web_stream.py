"""The stream of changes: each look is told, a quiet one shows that it lives, and there is room for so many readers."""

from __future__ import annotations

import pytest

from p2ptrain.monitor import web
from tests.support.coroutines import on_loop
from tests.support.web.site import served
from tests.support.web.stream_reader import Reader
from tests.support.web.watched import trainer

ADA, BOB = trainer("a"), trainer("b")


@on_loop
async def test_the_stream_tells_of_each_look_until_the_reader_goes() -> None:
    async with served(ADA, BOB) as site:
        reader = Reader(site.app)
        start = await reader.next()
        headers = dict(start["headers"])
        assert start["status"] == 200
        assert headers[b"content-type"].startswith(b"text/event-stream")
        assert b"content-encoding" not in headers, "compressed, it would wait for more"
        assert (await reader.snapshot())["headline"]["training"] == 2
        site.source.records = [ADA]
        await site.watch.look()
        assert (await reader.snapshot())["headline"]["training"] == 1
        await reader.leave()


@on_loop
async def test_a_quiet_stream_shows_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "HEARTBEAT_SECONDS", 0.0)
    async with served(ADA) as site:
        reader = Reader(site.app)
        told = [(await reader.next()).get("body", b"") for _ in range(10)]
        assert any(body.startswith(b":") for body in told)
        await reader.leave()


@on_loop
async def test_no_more_than_so_many_streams_and_room_again_when_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MAX_STREAMS", 2)
    async with served(ADA) as site:
        readers = [Reader(site.app) for _ in range(2)]
        for reader in readers:
            await reader.snapshot()
        assert (await site.get("/api/v1/stream")).status_code == 503
        await readers[0].leave()
        last = Reader(site.app)
        await last.snapshot()
        await last.leave()
        await readers[1].leave()
