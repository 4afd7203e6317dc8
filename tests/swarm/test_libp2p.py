"""The libp2p transport with real daemons on loopback: streams, dialling, limits and relays."""

import asyncio
import hashlib
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import uvloop

from p2ptrain.errors import LinkError, NotListeningError, PeerError, PeerLostError, PeerUnreachableError, WrongPeerError
from p2ptrain.network.identity import Identity
from p2ptrain.network.transport import Stream
from tests.support.coroutines import on_both_loops, on_loop
from tests.support.processes.daemons import (
    ECHO,
    connected,
    echo,
    echoes,
    eventually,
    free_port,
    loopback_transport,
    wait_until,
)


@on_loop
async def test_peer_ids_agree_with_hivemind_and_the_daemon() -> None:
    from hivemind.p2p import PeerID

    async with loopback_transport() as (identity, transport):
        assert PeerID.from_identity(identity.libp2p_key()).to_base58() == identity.peer_id
        assert transport.peer_id == identity.peer_id
        (address,) = await transport.addresses()
        assert address.endswith(f"/p2p/{identity.peer_id}")
        assert await transport.reachability() == "direct"


@pytest.mark.parametrize("reachability", [None, "private"])
@on_loop
async def test_only_a_private_peer_dials_from_the_port_at_which_it_listens(reachability: str | None) -> None:
    """Two that dial each other from there at once open one TCP connection, whose handshake fails at both ends."""
    port = free_port()
    listen = (f"/ip4/127.0.0.1/tcp/{port}",)
    async with (
        loopback_transport(listen=listen, force_reachability=reachability) as (_, a),
        loopback_transport() as (_, b),
    ):
        await a.connect(await b.addresses(), 10)
        (address,) = [address for remote, address in await b.connections() if remote == a.peer_id]
        assert (address == f"/ip4/127.0.0.1/tcp/{port}") == (reachability == "private"), address


@on_both_loops
async def test_bytes_arrive_exactly_although_the_sender_reuses_its_buffer() -> None:
    num_chunks, chunk_bytes = 64, 300_000
    expected = hashlib.sha256()
    received = hashlib.sha256()

    async def receive(stream: Stream) -> None:
        for _ in range(num_chunks):
            received.update(await stream.read(chunk_bytes))
        await stream.write(received.digest())
        await stream.read(1)

    async with connected(receive) as (a, b):
        stream = await a.open(b.peer_id, ECHO, 10)
        assert stream.remote == b.peer_id
        buffer = bytearray(chunk_bytes)
        for chunk in range(num_chunks):
            buffer[:] = bytes([chunk]) * chunk_bytes
            expected.update(buffer)
            await stream.write(memoryview(buffer))
        assert await stream.read(32) == expected.digest()
        await stream.close()
        await stream.close()


@on_loop
async def test_what_was_written_before_a_close_arrives() -> None:
    arrived: asyncio.Queue[bytes] = asyncio.Queue()

    async def receive(stream: Stream) -> None:
        await arrived.put(await stream.read(3_000_000))

    async with connected(receive) as (a, b):
        for _ in range(5):
            stream = await a.open(b.peer_id, ECHO, 10)
            await stream.write(b"x" * 3_000_000)
            await stream.close()
            assert await arrived.get() == b"x" * 3_000_000


@on_loop
async def test_a_reader_that_does_not_read_holds_the_writer_back() -> None:
    hold = asyncio.Event()

    async def ignore(stream: Stream) -> None:
        await hold.wait()

    async with connected(ignore) as (a, b):
        stream = await a.open(b.peer_id, ECHO, 10)
        sent = 0

        async def send_for_ever() -> None:
            nonlocal sent
            while True:
                await stream.write(bytes(1 << 16))
                sent += 1 << 16

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(send_for_ever(), timeout=2)
        assert 0 < sent < 8 << 20
        stream.abort()
        hold.set()


@on_loop
async def test_a_stream_that_breaks_takes_spare_connections_to_the_peer_with_it() -> None:
    async with connected() as (a, b):
        first, second, third = [await a.open(b.peer_id, ECHO, 10, expected_bytes=1 << 30) for _ in range(3)]
        await first.rest()
        await second.close()
        assert len(a.direct._spares) == 1
        third.abort()
        assert not a.direct._spares


@on_loop
async def test_refusals_are_unreachable_peers_with_the_reason() -> None:
    nobody = Identity.ephemeral()
    async with connected() as (a, b):
        with pytest.raises(PeerUnreachableError, match="protocols not supported"):
            await a.open(b.peer_id, "/test/unknown", 10)
        with pytest.raises(PeerUnreachableError):
            await a.open(nobody.peer_id, ECHO, 10)
        with pytest.raises(PeerUnreachableError):
            await a.open("garbage", ECHO, 10)
        with pytest.raises(NotListeningError, match="refused"):
            await a.connect([f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{nobody.peer_id}"], 10)
        wrong = (await b.addresses())[0].replace(b.peer_id, nobody.peer_id)
        with pytest.raises(PeerUnreachableError):
            await a.connect([wrong], 10)
        with pytest.raises(LinkError):
            await a.connect(["/ip4/127.0.0.1/tcp/1"], 10)
        with pytest.raises(PeerUnreachableError, match="no address"):
            await a.connect([], 10)


@on_loop
async def test_a_dial_to_a_wrong_peer_id_names_the_peer_at_that_address_however_often_it_is_tried() -> None:
    nobody = Identity.ephemeral()
    async with loopback_transport() as (_, a), loopback_transport() as (_, b):
        (address,) = await b.addresses()
        wrong = address.replace(b.peer_id, nobody.peer_id)
        for _ in range(3):  # After the first attempt the daemon's backoff hides the reason.
            with pytest.raises(WrongPeerError) as caught:
                await a.connect([wrong], 10)
            assert caught.value.holder == b.peer_id
            assert b.peer_id in str(caught.value)
        assert await a.connect([address], 10) == b.peer_id


@on_loop
async def test_connect_takes_whoever_answers() -> None:
    nobody = Identity.ephemeral()
    async with loopback_transport() as (_, a), loopback_transport() as (_, b):
        dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{nobody.peer_id}"
        assert await a.connect([dead, *await b.addresses()], 10) == b.peer_id
        assert await a.connected_peers() == [b.peer_id]


@pytest.mark.fault(25)
@on_loop
async def test_opening_ends_by_its_deadline_even_when_the_own_daemon_hangs() -> None:
    async with connected() as (a, b):
        daemon = psutil.Process(a.daemon.process_id)
        daemon.suspend()
        try:
            wait_until(lambda: daemon.status() == psutil.STATUS_STOPPED)
            async with asyncio.timeout(30):
                with pytest.raises(PeerUnreachableError, match="time"):
                    await a.open(b.peer_id, ECHO, 0.01)
        finally:
            daemon.resume()
        stream = await a.open(b.peer_id, ECHO, 10)
        assert await echoes(stream)
        stream.abort()


@on_loop
async def test_a_failing_handler_breaks_its_stream_alone() -> None:
    async def fail(stream: Stream) -> None:
        await stream.read(1)
        raise ValueError("broken on purpose")

    async with connected() as (a, b):
        await b.serve("/test/fail", fail)
        good, bad = await a.open(b.peer_id, ECHO, 10), await a.open(b.peer_id, "/test/fail", 10)
        with pytest.raises(PeerLostError):
            await echoes(bad)
        assert await echoes(good)
        bad.abort()
        good.abort()


@pytest.mark.fault(36)
@on_loop
async def test_streams_beyond_the_limit_are_refused_and_served_again_later() -> None:
    async with connected(max_streams=2) as (a, b):

        async def works(stream: Stream) -> bool:
            try:
                return await echoes(stream)
            except PeerLostError:
                stream.abort()
                return False

        first, second = await a.open(b.peer_id, ECHO, 10), await a.open(b.peer_id, ECHO, 10)
        assert await works(first)
        assert await works(second)
        assert not await works(await a.open(b.peer_id, ECHO, 10))
        assert await works(first)
        await first.close()
        for _ in range(100):
            retry = await a.open(b.peer_id, ECHO, 10)
            if await works(retry):
                break
            await asyncio.sleep(0.05)
        assert await works(retry)
        retry.abort()
        second.abort()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_it_runs_on_a_loop_of_another_thread(run: Callable[..., None]) -> None:
    outcome: list[Any] = []

    async def main() -> None:
        async with connected() as (a, b):
            outcome.append(await a.connected_peers() == [b.peer_id])

    thread = threading.Thread(target=lambda: run(main()))
    thread.start()
    thread.join()
    assert outcome == [True]


@on_loop
async def test_a_private_peer_is_reached_through_its_relay_at_once() -> None:
    async with loopback_transport(relay=True, force_reachability="public") as (_, relay):
        relays = tuple(await relay.addresses())
        settings: dict[str, Any] = {"bootstrap": relays, "trusted_relays": relays, "force_reachability": "private"}
        async with loopback_transport(**settings) as (_, a), loopback_transport() as (_, b):
            await a.serve(ECHO, echo)

            async def reserved() -> bool:
                return await a.reachability() == "relay"

            await eventually(reserved)
            relayed = [address for address in await a.addresses() if "/p2p-circuit/" in address]

            async def is_reached() -> bool:
                # A relayed connection may be replaced by a direct one, which breaks its streams.
                try:
                    assert await b.connect(relayed, 5) == a.peer_id
                    stream = await b.open(a.peer_id, ECHO, 5)
                    answered = await echoes(stream)
                except PeerError:
                    return False
                stream.abort()
                return answered

            await eventually(is_reached)
