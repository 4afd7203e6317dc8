"""Bytes come out as they went in, wherever they are cut, on both event loops."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from p2ptrain.network.libp2p.socket_stream import BUFFER_BYTES, SocketStream

Scenario = Callable[[SocketStream, SocketStream], Awaitable[None]]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Scenario], None]:
    """Runs a scenario with the two ends of a connection."""

    async def connected(scenario: Scenario) -> None:
        loop = asyncio.get_running_loop()
        accepted: asyncio.Future[SocketStream] = loop.create_future()
        path = str(tmp_path / "socket")
        server = await loop.create_unix_server(lambda: SocketStream(accepted.set_result), path)
        _, ours = await loop.create_unix_connection(SocketStream, path)
        theirs = await accepted
        try:
            async with asyncio.timeout(20):
                await scenario(ours, theirs)
        finally:
            ours.abort()
            theirs.abort()
            server.close()
            await asyncio.sleep(0.01)

    return lambda scenario: (uvloop.run if request.param == "uvloop" else asyncio.run)(connected(scenario))


def test_any_mix_of_reads_gives_the_bytes_that_were_written(run: Callable[[Scenario], None]) -> None:
    chance = random.Random(1)
    data = chance.randbytes(3_000_000)

    async def scenario(ours: SocketStream, theirs: SocketStream) -> None:
        async def write() -> None:
            at = 0
            while at < len(data):
                size = chance.choice([1, 5, 1000, BUFFER_BYTES, 300_000])
                await ours.write(memoryview(data)[at : at + size])
                at += size

        writing = asyncio.create_task(write())
        received = bytearray()
        while len(received) < len(data):
            size = min(chance.choice([1, 5, 5000, BUFFER_BYTES, 500_000]), len(data) - len(received))
            if chance.random() < 0.5:
                received += await theirs.read(size)
            else:
                piece = bytearray(size)
                await theirs.read_into(memoryview(piece))
                received += piece
            if chance.random() < 0.1:
                await asyncio.sleep(0.001)
        await writing
        assert received == data

    run(scenario)


def test_a_writer_is_held_back_while_nobody_reads(run: Callable[[Scenario], None]) -> None:
    async def scenario(ours: SocketStream, theirs: SocketStream) -> None:
        writing = asyncio.create_task(ours.write(bytes(8_000_000)))
        await asyncio.sleep(0.2)
        assert not writing.done()
        assert len(await theirs.read(8_000_000)) == 8_000_000
        await writing

    run(scenario)


def test_what_arrived_before_the_end_can_be_read_and_then_eof_is_raised(run: Callable[[Scenario], None]) -> None:
    async def scenario(ours: SocketStream, theirs: SocketStream) -> None:
        await ours.write(b"last words")
        await ours.close()
        await asyncio.sleep(0.05)
        assert await theirs.read(10) == b"last words"
        with pytest.raises(EOFError):
            await theirs.read(1)

    run(scenario)


def test_a_cancelled_read_leaves_the_buffer_alone_afterwards(run: Callable[[Scenario], None]) -> None:
    async def scenario(ours: SocketStream, theirs: SocketStream) -> None:
        view = bytearray(100)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await theirs.read_into(memoryview(view))
        await ours.write(b"x" * 100)
        assert await theirs.read(100) == b"x" * 100
        assert view == bytes(100)

    run(scenario)


def test_writing_to_an_aborted_stream_raises(run: Callable[[Scenario], None]) -> None:
    async def scenario(ours: SocketStream, theirs: SocketStream) -> None:
        ours.abort()
        with pytest.raises(OSError, match="closed"):
            await ours.write(b"too late")
        with pytest.raises((EOFError, OSError)):
            await theirs.read(1)

    run(scenario)


def test_a_peek_waits_for_all_that_it_is_asked_for_and_takes_nothing(run: Callable[[Scenario], None]) -> None:
    async def scenario(ours: SocketStream, theirs: SocketStream) -> None:
        size = 7 * BUFFER_BYTES // 16
        for number in range(20):
            piece = bytes([number]) * size
            peeking = asyncio.create_task(theirs.peek(size))
            await ours.write(piece[:-1])
            await asyncio.sleep(0)
            assert not peeking.done()
            await ours.write(piece[-1:])
            assert await peeking == await theirs.peek(size) == piece
            theirs.consume(size)
        ours.abort()
        with pytest.raises((EOFError, OSError)):
            await theirs.peek(1)

    run(scenario)
