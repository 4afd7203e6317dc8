"""Streams within one process: who gets them, what they copy, what they count as; streams as such have other tests."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import torch
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import PeerLostError, PeerUnreachableError
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.local import AHEAD_BYTES, LocalSocket, socket_pair
from p2ptrain.network.rpc.client import Rpc, RpcLimits
from p2ptrain.network.simulated import SimulatedNetwork, simulate
from p2ptrain.network.transport import Stream
from p2ptrain.runtime import real_runtime
from tests.support.processes.direct import until
from tests.support.sim.averagers import start_averagers, stop_averagers
from tests.support.sim.local import LocalTransport, in_memory

ECHO = "/test/echo"


async def echo(stream: Stream) -> None:
    while True:
        await stream.write(await stream.read(1))


async def echoes(stream: Stream) -> bool:
    await stream.write(b"x")
    return await stream.read(1) == b"x"


@asynccontextmanager
async def transports(*settings: dict[str, object]) -> AsyncIterator[list[LocalTransport]]:
    """One called ``0``, ``1``… with each of ``settings``, all of which echo."""
    started = [LocalTransport(str(index), **values) for index, values in enumerate(settings)]
    for transport in started:
        await transport.serve(ECHO, echo)
    try:
        yield started
    finally:
        for transport in started:
            await transport.close()


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Awaitable[None]]], None]:
    """Runs a scenario on each event loop, with a deadline."""

    async def bounded(main: Callable[[], Awaitable[None]]) -> None:
        async with asyncio.timeout(20):
            await main()

    return lambda main: (uvloop.run if request.param == "uvloop" else asyncio.run)(bounded(main))


Run = Callable[[Callable[[], Awaitable[None]]], None]


def test_a_stream_to_a_peer_of_this_loop_is_local_and_both_know_who_is_there(run: Run) -> None:
    async def main() -> None:
        async with transports({}, {}) as (a, b):
            remotes: asyncio.Queue[Stream] = asyncio.Queue()

            async def remember(stream: Stream) -> None:
                remotes.put_nowait(stream)
                await echo(stream)

            await b.serve(ECHO, remember)
            near = await a.open("1", ECHO, 5)
            assert await echoes(near)
            far = await remotes.get()
            assert (near.remote, near.is_local) == ("1", True)
            assert (far.remote, far.is_local) == ("0", True)
            await near.close()

    run(main)


@pytest.mark.parametrize(("mine", "theirs"), [(True, False), (False, True), (False, False)])
def test_who_takes_no_part_is_reached_and_reaches_others_through_the_network(mine: bool, theirs: bool) -> None:
    async def main() -> None:
        async with transports({"local_shortcut": mine}, {"local_shortcut": theirs}) as (a, _):
            with pytest.raises(PeerUnreachableError, match="there is no daemon"):
                await a.open("1", ECHO, 5)

    asyncio.run(main())


def test_a_protocol_that_is_not_served_is_refused_as_by_a_daemon(run: Run) -> None:
    async def main() -> None:
        async with transports({}, {}) as (a, _):
            with pytest.raises(PeerUnreachableError):
                await a.open("1", "/test/other", 5)

    run(main)


def test_peers_of_another_event_loop_are_not_found() -> None:
    ready, done = threading.Event(), threading.Event()

    async def elsewhere() -> None:
        async with transports({}, {}) as (_, other):
            assert await echoes(await other.open("0", ECHO, 5))
            ready.set()
            await asyncio.to_thread(done.wait, 20)

    async def main() -> None:
        async with transports({}) as (a,):
            with pytest.raises(PeerUnreachableError, match="there is no daemon"):
                await a.open("1", ECHO, 5)

    thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
    thread.start()
    try:
        assert ready.wait(20)
        asyncio.run(main())
    finally:
        done.set()
        thread.join(20)


def test_who_is_forgotten_is_not_found_any_more(run: Run) -> None:
    async def main() -> None:
        async with transports({}) as (a,):
            other = LocalTransport("1")
            await other.serve(ECHO, echo)
            assert await echoes(await a.open("1", ECHO, 5))
            await a.close()
            del other
        gc.collect()
        async with transports({}) as (a,):
            with pytest.raises(PeerUnreachableError):
                await a.open("1", ECHO, 5)

    run(main)


@pytest.mark.parametrize("how", ["closes", "loses its daemon"])
def test_streams_end_when_either_peer_closes_or_loses_its_daemon(run: Run, how: str) -> None:
    async def main() -> None:
        for closing in (0, 1):
            async with transports({}, {}) as both:
                stream = await both[0].open("1", ECHO, 5)
                assert await echoes(stream)
                if how == "closes":
                    await both[closing].close()
                else:
                    both[closing]._daemon_lost("gone")
                with pytest.raises(PeerLostError):
                    await stream.read(1)
                with pytest.raises(PeerLostError):
                    await stream.write(b"x")
                with pytest.raises(PeerUnreachableError):
                    await both[0].open("1", ECHO, 5)
                stream.abort()
                await until(lambda: both[0].num_streams == both[1].num_streams == 0)

    run(main)


def test_streams_beyond_the_limit_are_refused_here_too(run: Run) -> None:
    async def main() -> None:
        async with transports({}, {"max_streams": 1}) as (a, _):
            assert await echoes(await a.open("1", ECHO, 5))
            with pytest.raises(PeerLostError):
                await echoes(await a.open("1", ECHO, 5))

    run(main)


@given(st.lists(st.integers(1, 2 * AHEAD_BYTES), min_size=1, max_size=4), st.data())
def test_what_a_writer_changes_after_a_write_is_not_seen(sizes: list[int], data: st.DataObject) -> None:
    total = sum(sizes)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=4)))

    async def main() -> None:
        ours, theirs = socket_pair()

        async def write() -> None:
            for number, size in enumerate(sizes):
                buffer = bytearray([number]) * size
                await ours.write(buffer)
                buffer[:] = b"\xff" * size

        writing = asyncio.create_task(write())
        got = [await theirs.read(high - low) for low, high in zip([0, *cuts], [*cuts, total], strict=True)]
        await writing
        assert b"".join(got) == b"".join(bytes([number]) * size for number, size in enumerate(sizes))

    asyncio.run(main())


@pytest.mark.parametrize("size", [1, 5000, 3 * AHEAD_BYTES])
def test_what_nobody_reads_is_bounded(size: int) -> None:
    async def main() -> None:
        ours, theirs = socket_pair()

        async def write() -> None:
            while True:
                await ours.write(bytes(size))

        writing = asyncio.create_task(write())
        before = -1
        while theirs.num_arrived != before:
            before = theirs.num_arrived
            await asyncio.sleep(0.01)
        assert 0 < before <= AHEAD_BYTES + size
        theirs.abort()
        with pytest.raises(OSError, match="closed"):
            await writing

    asyncio.run(main())


def test_a_cancelled_write_ends_the_stream_since_a_part_may_be_through() -> None:
    async def main() -> None:
        ours, theirs = socket_pair()
        writing = asyncio.create_task(ours.write(bytes(2 * AHEAD_BYTES)))
        assert len(await theirs.read(AHEAD_BYTES)) == AHEAD_BYTES
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        with pytest.raises(EOFError):
            await theirs.read(1)
        with pytest.raises(OSError, match="closed"):
            await ours.write(b"x")

    asyncio.run(main())


def test_writes_of_several_tasks_stay_whole() -> None:
    async def main() -> None:
        ours, theirs = socket_pair()
        size = AHEAD_BYTES // 3

        async def write(sender: LocalSocket, number: int) -> None:
            await sender.write(bytes([number]) * size, bytes([number]) * 7)

        writing = [asyncio.create_task(write(ours, number)) for number in range(20)]
        pieces = [await theirs.read(size + 7) for _ in writing]
        await asyncio.gather(*writing)
        assert sorted(set(piece) for piece in pieces) == [{number} for number in range(20)]

    asyncio.run(main())


def test_local_bytes_are_no_traffic_and_no_cap_holds_them_back() -> None:
    num_bytes = 3_000_000

    async def main() -> None:
        runtime = real_runtime()
        async with transports({}, {}) as both:
            capped = RpcLimits(up_bytes_per_second=1000, down_bytes_per_second=1000)
            caller, server = (Rpc(one, runtime, b"\x07" * 32, capped) for one in both)

            async def take(channel: object, request: dict[str, object]) -> None:
                await channel.receive_bytes(num_bytes, 5)  # type: ignore[attr-defined]

            server.serve_channel("take", take)
            await server.start()
            async with asyncio.timeout(10), caller.open("1", "take", {}, 5) as channel:
                await channel.send_bytes(bytes(num_bytes))
            assert caller.bytes_sent == caller.bytes_received == server.bytes_sent == server.bytes_received == 0
            assert num_bytes < caller.local_bytes_sent < 1.01 * num_bytes
            assert server.local_bytes_received == caller.local_bytes_sent
            assert caller.local_bytes_received == server.local_bytes_sent > 0
            await server.close()
        runtime.close()

    asyncio.run(main())


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_peers_average_to_the_same_bits_over_a_network_and_in_memory(codec: str) -> None:
    spec = AveragingSpec(codec=codec, grace_seconds=1.0)

    def means(is_local: bool) -> list[torch.Tensor]:
        async def main(network: SimulatedNetwork) -> list[torch.Tensor]:
            network = in_memory(network) if is_local else network
            started = await start_averagers(network, [network.add_peer(name) for name in "ab"], spec, 100_000)
            try:
                await asyncio.gather(*(each.round_until_committed() for each in started))
                assert all(each.rpc.bytes_sent == 0 for each in started) == is_local
                return [each.mean() for each in started]
            finally:
                await stop_averagers(started)

        return simulate(main, 1)

    found = [*means(False), *means(True)]
    assert len(found) == 4
    assert found[0].any()
    assert all(torch.equal(one, found[0]) for one in found)
