"""The port for direct connections lets in who was offered one, once and in time, and bounds everybody else."""

import asyncio
import contextlib
import gc
import os
import resource
import socket

import pytest

from p2ptrain.network.libp2p import direct_listener
from p2ptrain.network.libp2p.direct_records import HELLO_BYTES, NAME_BYTES, Kind, SealedSocket
from p2ptrain.network.libp2p.socket_stream import SocketStream
from tests.support.coroutines import on_both_loops
from tests.support.processes.direct import BULK, Dialler, DirectPeer, direct_peers, opened, until

pytestmark = pytest.mark.usefixtures("nothing_leaks")


async def sent_by_stranger(peer: DirectPeer, data: bytes) -> bytes:
    """The answer of a peer's port to bytes of a stranger, until it closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", peer.listener.port)
    writer.write(data)
    try:
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


@on_both_loops
async def test_the_first_record_has_to_show_the_key() -> None:
    async with direct_peers() as (_, b):
        honest, thief = Dialler(b, "a"), Dialler(b, "t")
        # Who sees a name pass by, or has an offer of its own, does not get in by it, nor use it up.
        for record in (
            bytes(HELLO_BYTES - NAME_BYTES),
            thief.hello[NAME_BYTES:],
            honest.sealing.mark(Kind.READY),  # the second record of the right key
        ):
            assert not await honest.is_let_in(honest.name + record)
        assert b.direct.refusals == {"wrong key": 3}
        assert await honest.is_let_in()
        assert b.streams.empty()


@on_both_loops
async def test_a_right_record_of_another_kind_lets_nobody_in() -> None:
    async with direct_peers() as (_, b):
        one = Dialler(b, "a")
        one.sealing._num_records = 0
        assert not await one.is_let_in(one.name + one.sealing.mark(Kind.START))
        assert b.direct.refusals == {"wrong key": 1}


@on_both_loops
async def test_an_offer_is_good_once() -> None:
    async with direct_peers() as (_, b):
        one = Dialler(b, "a")
        assert await one.is_let_in()
        assert await sent_by_stranger(b, one.hello) == b""
        assert b.direct.refusals == {"unknown name": 1}


@on_both_loops
async def test_an_expired_offer_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_listener, "OFFER_SECONDS", 0.1)
    async with direct_peers() as (_, b):
        early, late = Dialler(b, "a"), Dialler(b, "a")
        stream = await early.connect(early.hello[:-1])
        await asyncio.sleep(0.15)
        await SocketStream.write(stream, early.hello[-1:])
        with pytest.raises((EOFError, OSError)):
            await stream.expect(Kind.READY)
        assert not await late.is_let_in()
        assert b.direct.refusals == {"expired offer": 2}


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", bytes(HELLO_BYTES), b"\xff" * 100])
@on_both_loops
async def test_who_was_offered_nothing_hears_nothing_and_costs_no_buffers(
    monkeypatch: pytest.MonkeyPatch, greeting: bytes
) -> None:
    def fail(*_: object) -> SealedSocket:
        raise AssertionError("a stranger has buffers")

    monkeypatch.setattr(direct_listener, "SealedSocket", fail)
    async with direct_peers() as (_, b):
        Dialler(b, "a")
        assert await sent_by_stranger(b, greeting) == b""
        assert b.direct.refusals == {"unknown name": 1}


@pytest.mark.parametrize("num_bytes", [0, 1, HELLO_BYTES - 1])
@on_both_loops
async def test_who_is_slow_is_cut_off(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_listener, "HANDSHAKE_SECONDS", 0.3)
    async with direct_peers() as (_, b):
        assert await sent_by_stranger(b, Dialler(b, "a").hello[:num_bytes]) == b""
        assert b.direct.refusals == {"too slow": 1}


@on_both_loops
async def test_a_listener_that_closes_waits_for_nobody() -> None:
    async with direct_peers() as (_, b):
        silent = await asyncio.open_connection("127.0.0.1", b.listener.port)
        known = await Dialler(b, "a").connect()
        await known.expect(Kind.READY)
        begun = await Dialler(b, "a").connect()
        await begun.expect(Kind.READY)
        await begun.mark(Kind.START)
        await b.streams.get()
        async with asyncio.timeout(2):
            await b.direct.close()
            assert await silent[0].read() == b""
            for stream in (known, begun):
                with pytest.raises(OSError):  # noqa: PT011 - cut, in one way or another
                    await stream.read(1)
        silent[1].transport.abort()


@on_both_loops
async def test_who_goes_away_is_counted() -> None:
    async with direct_peers() as (_, b):
        _, writer = await asyncio.open_connection("127.0.0.1", b.listener.port)
        writer.close()
        await until(lambda: b.direct.refusals == {"no hello": 1})


@pytest.mark.parametrize("begins", ["not", "with data"])
@on_both_loops
async def test_who_does_not_begin_a_stream_is_cut_off(begins: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_listener, "SPARE_SECONDS", 0.2)
    async with direct_peers() as (_, b):
        stream = await Dialler(b, "a").connect()
        await stream.expect(Kind.READY)
        if begins == "with data":
            await stream.write(b"?")
        with pytest.raises(OSError):  # noqa: PT011 - cut, in one way or another
            await stream.read(1)
        assert b.streams.empty()


@on_both_loops
async def test_connections_without_a_key_are_bounded_for_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_listener, "MAX_HANDSHAKES", 3)
    monkeypatch.setattr(direct_listener, "MAX_HANDSHAKES_PER_HOST", 2)
    monkeypatch.setattr(direct_listener, "HANDSHAKE_SECONDS", 20)
    async with direct_peers() as (_, b):
        listener = b.listener
        held = [await asyncio.open_connection("127.0.0.1", b.listener.port) for _ in range(2)]
        await until(lambda: len(listener._handshakes) == 2)
        assert await sent_by_stranger(b, b"") == b""
        assert b.direct.refusals == {"too many handshakes": 1}
        for _, one in held:
            one.transport.abort()
        await until(lambda: not listener._handshakes)
        assert await Dialler(b, "a").is_let_in()


@on_both_loops
async def test_connections_of_one_peer_and_of_all_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_listener, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(direct_listener, "MAX_CONNECTIONS_PER_PEER", 2)
    async with direct_peers("abc") as (a, b, c):
        first, far = await opened(a, b)
        second, _ = await opened(a, b)
        assert await a.direct.open("b", BULK, 5, is_large=True) is None
        assert b.direct.refusals["too many connections"] == 1
        assert first.rest()  # A connection that waits for its next stream counts, too.
        assert far.rest()
        third, _ = await opened(c, b)
        assert await c.direct.open("b", BULK, 5, is_large=True) is None
        for stream in (first, second, third):
            stream.abort()


@on_both_loops
async def test_spares_leave_half_of_the_connections_to_large_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_listener, "MAX_CONNECTIONS", 4)
    async with direct_peers("abcd") as (a, b, c, d):
        for peer in (a, c, d):
            for _ in range(2):
                assert await peer.direct.open("b", BULK, 5, is_large=False) is None
            await peer.direct._dials.join()
        assert [len(peer.direct._spares) for peer in (a, c, d)] == [1, 1, 0]
        near, _ = await opened(d, b)
        near.abort()


@pytest.mark.parametrize("turns", range(8))
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@on_both_loops
async def test_a_connection_that_arrives_while_the_listener_closes_is_closed(turns: int) -> None:
    async with direct_peers() as (_, b):
        dialler = socket.create_connection(("127.0.0.1", b.listener.port))
        dialler.setblocking(False)
        for _ in range(turns):  # of the event loop: it is accepted in one and served from a later one on
            await asyncio.sleep(0)
        await b.direct.close()
        gc.collect()
        with dialler, contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(dialler, 1), 5) == b""


@on_both_loops
async def test_connections_wait_while_no_file_descriptor_is_free() -> None:
    async with direct_peers() as (_, b):
        one, own_limits = Dialler(b, "a"), resource.getrlimit(resource.RLIMIT_NOFILE)
        dialler = socket.socket()
        fillers = [os.dup(dialler.fileno())]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[0] + 1, own_limits[1]))
            with contextlib.suppress(OSError):
                while True:
                    fillers.append(os.dup(dialler.fileno()))
            dialler.connect(("127.0.0.1", b.listener.port))
            await until(lambda: b.direct.refusals["not accepted"] == 2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, own_limits)
            for filler in fillers:
                os.close(filler)
        await until(lambda: len(b.listener._handshakes) == 1)
        dialler.close()
        assert await one.is_let_in()
