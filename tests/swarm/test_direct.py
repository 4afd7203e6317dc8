"""Direct connections between peers with real daemons: the same streams and errors, and a way around failures."""

import asyncio
import os
import signal

import pytest

from p2ptrain.errors import PeerLostError
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.schema import Nothing
from p2ptrain.network.transport import Stream
from p2ptrain.runtime import real_runtime
from tests.support.coroutines import on_both_loops, on_loop, on_uvloop
from tests.support.processes.daemons import ECHO, RPC_SERVER, connected, echo, echoes, loopback_transport, peer_process

SWARM = b"\x07" * 32
MUCH = 1 << 30

HANG = """
async def hang(channel, request):
    await channel.send(request)
    await asyncio.sleep(3600)
"""
SERVER = RPC_SERVER.format(handler=HANG, serve="serve_channel")


@on_both_loops
async def test_streams_that_carry_much_go_directly_and_others_do_not() -> None:
    callers: asyncio.Queue[str] = asyncio.Queue()

    async def answer(stream: Stream) -> None:
        callers.put_nowait(stream.remote)
        await echo(stream)

    async with connected(answer) as (a, b):
        for expected_bytes, is_direct in ((0, False), (MUCH, True)):
            stream = await a.open(b.peer_id, ECHO, 10, expected_bytes=expected_bytes)
            assert stream.remote == b.peer_id
            assert await echoes(stream)
            assert await callers.get() == a.peer_id
            assert (a.direct.num_dialled > 0) == is_direct
            await stream.close()


@pytest.mark.parametrize(("mine", "theirs"), [("off", "auto"), ("auto", "off"), ("off", "off")])
@on_loop
async def test_who_takes_no_part_is_reached_through_the_daemon(mine: str, theirs: str) -> None:
    async with loopback_transport(direct=mine) as (_, a), loopback_transport(direct=theirs) as (_, b):
        await b.serve(ECHO, echo)
        peer = await a.connect(await b.addresses(), 10)
        stream = await a.open(peer, ECHO, 10, expected_bytes=MUCH)
        assert await echoes(stream)
        assert a.direct.num_dialled == 0
        assert (b.direct.listener is not None) == (theirs == "auto")
        stream.abort()


@on_loop
async def test_streams_beyond_the_limit_are_refused_there_too() -> None:
    async with connected(max_streams=1) as (a, b):
        first = await a.open(b.peer_id, ECHO, 10)
        assert await echoes(first)
        second = await a.open(b.peer_id, ECHO, 10, expected_bytes=MUCH)
        assert a.direct.num_dialled > 0
        with pytest.raises(PeerLostError):
            await second.read(1)
        first.abort()
        second.abort()


@on_loop
async def test_direct_streams_end_with_the_transport() -> None:
    async with loopback_transport() as (_, a):
        async with loopback_transport() as (_, b):
            await b.serve(ECHO, echo)
            stream = await a.open(await a.connect(await b.addresses(), 10), ECHO, 10, expected_bytes=MUCH)
            assert a.direct.num_dialled > 0
        with pytest.raises(PeerLostError):
            await stream.read(1)
        stream.abort()


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
@on_uvloop
async def test_a_process_that_dies_or_stops_is_noticed_as_on_any_stream(blow: signal.Signals) -> None:
    async with loopback_transport() as (_, transport):
        rpc = Rpc(transport, real_runtime(), SWARM)
        with peer_process(SERVER) as (process, told):
            peer = await transport.connect(told["addresses"], 10)
            async with rpc.open(peer, "hang", Nothing(), 10, expected_bytes=MUCH) as channel:
                await channel.receive(Nothing, 10)
                assert transport.direct.num_dialled > 0
                os.kill(process.pid, blow)
                async with asyncio.timeout(60):
                    with pytest.raises(PeerLostError):
                        await channel.receive(Nothing, 3600)
        await rpc.close()
        rpc.runtime.close()
