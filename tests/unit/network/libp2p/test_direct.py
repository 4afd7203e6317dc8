"""Direct connections lead to who they were agreed on with, and to the daemon where there is no way."""

import asyncio
import os
import socket

import pytest

from p2ptrain.errors import ResourceError
from p2ptrain.network.libp2p import direct, direct_listener
from p2ptrain.network.libp2p.direct import OFFERS, Ask, Offer
from p2ptrain.network.libp2p.direct_records import SealedSocket
from p2ptrain.network.libp2p.socket_stream import SocketStream
from p2ptrain.network.rpc.frames import FRAME, Kind, error_frame, frame, pack
from tests.support.coroutines import on_both_loops, on_loop
from tests.support.processes.direct import BULK, HERE, DirectPeer, direct_peers, opened, until

pytestmark = pytest.mark.usefixtures("nothing_leaks")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@on_both_loops
async def test_bytes_go_both_ways_between_the_peers_that_agreed(host: str) -> None:
    data = os.urandom(3_000_000)
    async with direct_peers(host=host) as (a, b):
        near, far = await opened(a, b)
        received = memoryview(bytearray(len(data)))
        await asyncio.gather(
            near.write(data[:5], data[5:]), far.write(data), far.read_into(received), near.read(len(data))
        )
        assert received == data
        await asyncio.gather(near.close(), far.close())


@on_both_loops
async def test_a_connection_carries_one_stream_after_the_other() -> None:
    async with direct_peers() as (a, b):
        near, far = await opened(a, b)
        asked = a.control.num_asked
        for number in range(5):
            await near.write(bytes([number]))
            assert await far.read(1) == bytes([number])
            # Whichever end is through first, the next stream waits for the other.
            for end in (near, far) if number % 2 else (far, near):
                assert end.rest()
            again, far = await opened(a, b)
            assert again is near
        assert a.control.num_asked == asked
        assert a.direct.num_dialled == 1
        near.abort()


@on_both_loops
async def test_streams_at_a_time_have_a_connection_each_and_some_are_kept() -> None:
    async with direct_peers() as (a, b):
        ends = [await opened(a, b) for _ in range(direct.MAX_SPARES_PER_PEER + 1)]
        nears = {near for near, _ in ends}
        assert len(nears) == len(ends)
        assert [near.rest() and far.rest() for near, far in ends] == [True] * (len(ends) - 1) + [False]
        ends[-1][0].abort()
        assert {(await opened(a, b))[0] for _ in ends[:-1]} == nears - {ends[-1][0]}


async def small(a: DirectPeer, b: DirectPeer) -> SealedSocket | None:
    return await a.direct.open(b.name, BULK, 5, is_large=False)


@on_both_loops
async def test_a_small_stream_dials_nothing_but_the_second_one_dials_for_the_next() -> None:
    async with direct_peers() as (a, b):
        assert await small(a, b) is None
        assert len(a.direct._dials) == 0
        assert await small(a, b) is None
        assert await small(a, b) is None  # and does not dial twice
        await until(lambda: len(a.direct._spares) == 1)
        near = await small(a, b)
        assert near is not None
        await near.write(b"x")  # together with START
        _, _, far = await b.streams.get()
        assert await far.read(1) == b"x"
        assert a.direct.num_dialled == 1
        near.abort()


@on_both_loops
async def test_a_small_stream_does_not_wait_until_the_listener_is_ready_again() -> None:
    async with direct_peers() as (a, b):
        near, far = await opened(a, b)
        assert near.rest()
        assert await small(a, b) is None
        assert far.rest()
        await until(lambda: near.has_record)
        assert await small(a, b) is near


@on_both_loops
async def test_two_streams_may_wait_for_spares_that_never_get_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "READY_SECONDS", 0.2)
    async with direct_peers() as (a, b):
        ends = [await opened(a, b), await opened(a, b)]
        assert all(near.rest() for near, _ in ends)
        found = await asyncio.gather(*(a.direct.open("b", BULK, 5, is_large=True) for _ in range(2)))
        assert None not in found
        assert not {near for near, _ in ends}.intersection(found)


@on_both_loops
async def test_a_spare_is_not_used_once_another_stream_with_the_peer_broke() -> None:
    async with direct_peers("abc") as (a, b, c):
        gone, kept = await spare(a, b), await spare(a, c)
        a.direct.forget("b")
        assert gone.is_closing
        assert await small(a, b) is None
        assert await small(a, c) is kept


@on_both_loops
async def test_a_large_stream_waits_for_one_listener_and_then_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "READY_SECONDS", 1.0)
    monkeypatch.setattr(direct, "DIAL_SECONDS", 2.5)
    async with direct_peers() as (a, b):
        ends = [await opened(a, b) for _ in range(direct.MAX_SPARES_PER_PEER)]
        assert all(near.rest() for near, _ in ends)
        near = await a.direct.open("b", BULK, 5, is_large=True)
        assert near is not None
        assert len(a.direct._spares) == len(ends) - 1


@on_both_loops
async def test_small_streams_to_a_peer_without_a_way_try_seldom() -> None:
    async with direct_peers() as (a, b):
        ways, a.control.ways = a.control.ways, []
        for _ in range(10):
            assert await small(a, b) is None
            await asyncio.sleep(0)
        assert a.control.num_listed == 1
        a.control.ways = ways
        a.direct._spare_from["b", BULK] = 0.0  # The rest is over.
        assert await small(a, b) is None
        await until(lambda: len(a.direct._spares) == 1)


@on_loop
async def test_a_spare_is_not_dialled_beyond_the_end() -> None:
    async with direct_peers() as (a, b):
        assert await small(a, b) is None
        with socket.create_server(("127.0.0.1", 0)) as silent:
            b.listener.port = silent.getsockname()[1]
            assert await small(a, b) is None
            await until(lambda: a.control.num_asked == 1)
            await a.direct.close()
        assert not a.direct._dials
        assert not a.direct._rests


@pytest.mark.parametrize("word", [b"", b"?"], ids=["silent", "wrong"])
@on_both_loops
async def test_a_listener_that_is_not_ready_again_is_dialled_anew(monkeypatch: pytest.MonkeyPatch, word: bytes) -> None:
    monkeypatch.setattr(direct, "READY_SECONDS", 0.3)
    async with direct_peers() as (a, b):
        near, far = await opened(a, b)
        if word:
            await far.write(word)
        assert near.rest()
        again, _ = await opened(a, b)
        assert again is not near
        assert near.is_closing
        again.abort()


async def spare(a: DirectPeer, b: DirectPeer) -> SealedSocket:
    """A connection from ``a`` to ``b`` that waits for a stream."""
    near, far = await opened(a, b)
    assert near.rest()
    assert far.rest()
    await until(lambda: near.has_record)
    return near


@on_both_loops
async def test_a_spare_connection_whose_other_end_is_gone_is_not_used() -> None:
    async with direct_peers() as (a, b):
        near = await spare(a, b)
        await b.direct.close()
        await until(lambda: near.is_closing)
        assert await small(a, b) is None
        assert await a.direct.open("b", BULK, 5, is_large=True) is None


@on_both_loops
async def test_spare_connections_end_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_listener, "SPARE_SECONDS", 0.2)
    async with direct_peers() as (a, b):
        await spare(a, b)
        await until(lambda: len(a.direct._spares) == 0)
        await until(lambda: not b.listener._connections)


# Where there is no way


@on_both_loops
async def test_a_closed_port_is_left_alone_for_a_while() -> None:
    async with direct_peers() as (a, b):
        await b.listener.close()
        assert await a.direct.open("b", BULK, 5, is_large=True) is None
        assert a.control.num_asked == 1
        assert await a.direct.open("b", BULK, 5, is_large=True) is None
        assert a.control.num_asked == 1


@on_both_loops
async def test_rests_grow_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "FIRST_REST_SECONDS", 0.1)
    async with direct_peers() as (a, b):
        b.direct._served = ()
        assert await a.direct.open("b", BULK, 5, is_large=True) is None
        await asyncio.sleep(0.12)
        assert await a.direct.open("b", BULK, 5, is_large=True) is None
        assert a.direct._rests["b"][0].next() == pytest.approx(0.4)  # after 0.1 and 0.2
        b.direct._served = (BULK,)
        await asyncio.sleep(0.22)
        near, _ = await opened(a, b)
        assert not a.direct._rests
        near.abort()


@on_both_loops
async def test_a_port_that_does_not_answer_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "TCP_SECONDS", 0.2)
    async with direct_peers() as (a, b):
        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            fillers = [socket.socket() for _ in range(4)]
            for filler in fillers:
                filler.setblocking(False)
                filler.connect_ex(full.getsockname())
            b.listener.port = full.getsockname()[1]
            started = asyncio.get_running_loop().time()
            assert await a.direct.open("b", BULK, 5, is_large=True) is None
            assert asyncio.get_running_loop().time() - started < 2
            for filler in fillers:
                filler.close()


@on_both_loops
async def test_a_dial_that_is_cancelled_leaves_nothing_behind() -> None:
    async with direct_peers() as (a, b):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            b.listener.port = silent.getsockname()[1]
            for seconds in (0.001, 0.01, 0.1):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(a.direct.open("b", BULK, 5, is_large=True), seconds)
        assert not a.direct._rests


@on_both_loops
async def test_only_addresses_of_the_daemons_connections_are_dialled() -> None:
    async with direct_peers() as (a, _):
        a.control.ways = [("b", f"{HERE}/p2p/QmRelay/p2p-circuit"), ("c", HERE)]
        assert await a.direct.open("b", BULK, 5, is_large=True) is None
        assert a.control.num_asked == 0
        assert not a.direct._rests  # a hole may be punched at any time
        a.control.ways = [("b", HERE)]
        assert await a.direct.open("b", BULK, 5, is_large=True) is not None


@on_both_loops
async def test_who_sits_on_the_path_gets_nothing() -> None:
    async with direct_peers("abm") as (a, b, m):
        # It sends the connection to itself, although it has seen no key.
        b.listener.port = m.listener.port
        assert await a.direct.open("b", BULK, 5, is_large=True) is None
        assert m.direct.refusals == {"unknown name": 1}
        assert b.streams.empty()


@pytest.mark.parametrize("mistaken", ["a", "b"])
@on_both_loops
async def test_a_connection_is_bound_to_both_peers(mistaken: str) -> None:
    async with direct_peers() as (a, b):
        if mistaken == "a":
            a.direct._own_id = "c"
        else:
            b.listener._own_id = "c"
        assert await a.direct.open("b", BULK, 5, is_large=True) is None
        assert b.direct.refusals == {"unknown name": 1}


def is_error(answer: bytes) -> bool:
    return bool(FRAME.unpack_from(answer)[1] == Kind.ERROR)


async def answered(a: DirectPeer, b: DirectPeer, answer: bytes) -> SealedSocket | None:
    """The connection of ``a`` after this answer of ``b`` to its request for an offer."""

    async def lie(peer: str, stream: SocketStream) -> None:
        await stream.read(1)
        await stream.write(answer)

    await b.control.serve_stream(OFFERS, lie)
    return await a.direct.open("b", BULK, 5, is_large=True)


@pytest.mark.parametrize("key", [bytes(32), bytes([1]) + bytes(31)], ids=["zero", "one"])
@on_both_loops
async def test_keys_that_lead_to_a_known_secret_lead_nowhere(key: bytes) -> None:
    async with direct_peers() as (a, b):
        assert is_error(b.direct._answer_to("a", Ask(BULK, key)))
        assert not b.listener._offers
        offer = frame(Kind.MESSAGE, pack(Offer(b.listener.port, key)))
        assert await answered(a, b, offer) is None
        assert "b" in a.direct._rests


@pytest.mark.parametrize(
    "answer", [b"", error_frame("no"), frame(Kind.MESSAGE, b"?"), frame(Kind.BULK, b"?"), b"\x00\xff\xff\xff\x01"]
)
@on_both_loops
async def test_another_answer_than_an_offer_leads_nowhere(answer: bytes) -> None:
    async with direct_peers() as (a, b):
        assert await answered(a, b, answer) is None
        assert "b" in a.direct._rests


@on_loop
async def test_what_is_not_served_is_offered_to_nobody() -> None:
    async with direct_peers() as (_, b):
        assert is_error(b.direct._answer_to("a", Ask("/other", bytes(range(32)))))
        assert not is_error(b.direct._answer_to("a", Ask(BULK, bytes(range(32)))))


@on_both_loops
async def test_who_listens_nowhere_can_dial_all_the_same() -> None:
    async with direct_peers() as (a, b):
        await a.listener.close()
        a.direct.listener = None
        near, _ = await opened(a, b)
        assert await b.direct.open("a", BULK, 5, is_large=True) is None
        near.abort()


@on_loop
async def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with direct_peers() as (a, _):
            with pytest.raises(ResourceError, match=str(port)):
                await a.direct.start(("127.0.0.1",), port)
