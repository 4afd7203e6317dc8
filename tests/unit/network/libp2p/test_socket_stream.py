"""Bytes come out as they went in, wherever they are cut, on both event loops."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from p2ptrain.network.libp2p.socket_stream import BUFFER_BYTES, SocketStream
from tests.support.coroutines import on_both_loops


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[SocketStream, SocketStream]]:
    """The two ends of a connection."""
    ours, theirs = SocketStream(), SocketStream()
    for stream, end in zip((ours, theirs), socket.socketpair(), strict=True):
        await asyncio.get_running_loop().create_unix_connection(lambda stream=stream: stream, sock=end)  # type: ignore[misc]
    try:
        yield ours, theirs
    finally:
        ours.abort()
        theirs.abort()
        await asyncio.gather(ours.wait_gone(), theirs.wait_gone())


@on_both_loops
async def test_any_mix_of_reads_gives_the_bytes_that_were_written() -> None:
    chance = random.Random(1)
    data = chance.randbytes(3_000_000)
    async with connected() as (ours, theirs):

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


@on_both_loops
async def test_a_cancelled_read_leaves_the_buffer_alone_afterwards() -> None:
    async with connected() as (ours, theirs):
        view = bytearray(100)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await theirs.read_into(memoryview(view))
        await ours.write(b"x" * 100)
        assert await theirs.read(100) == b"x" * 100
        assert view == bytes(100)


@on_both_loops
async def test_writing_to_an_aborted_stream_raises() -> None:
    async with connected() as (ours, theirs):
        ours.abort()
        with pytest.raises(OSError, match="closed"):
            await ours.write(b"too late")
        with pytest.raises((EOFError, OSError)):
            await theirs.read(1)


@on_both_loops
async def test_a_peek_waits_for_all_that_it_is_asked_for_and_takes_nothing() -> None:
    async with connected() as (ours, theirs):
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


@on_both_loops
async def test_a_short_read_takes_what_follows_from_the_kernel_too(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals: list[int] = []
    updated = SocketStream.buffer_updated

    def counted(stream: SocketStream, nbytes: int) -> None:
        arrivals.append(nbytes)
        updated(stream, nbytes)

    monkeypatch.setattr(SocketStream, "buffer_updated", counted)
    async with connected() as (ours, theirs):
        reading = asyncio.create_task(theirs.read(5))
        await asyncio.sleep(0)
        await ours.write(b"12345", b"the message")
        assert (await reading, await theirs.read(11)) == (b"12345", b"the message")
        assert arrivals == [16]
