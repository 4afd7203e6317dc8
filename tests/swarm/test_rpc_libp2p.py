"""Requests and channels over real daemons on loopback; the same scenario as on the simulated network."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from p2ptrain.errors import PeerLostError
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.schema import Nothing
from p2ptrain.runtime import real_runtime
from tests.support.coroutines import on_uvloop
from tests.support.processes.daemons import RPC_SERVER, connected, eventually, loopback_transport, peer_process
from tests.support.sim.rpc_scenario import run_scenario, serve_scenario

SWARM = b"\x07" * 32

HANG = """
async def hang(peer, request):
    await asyncio.sleep(3600)
"""
SERVER = RPC_SERVER.format(handler=HANG, serve="serve")


@asynccontextmanager
async def rpc_pair() -> AsyncIterator[tuple[Rpc, Rpc]]:
    """Two connected peers in this process, each with a daemon of its own."""
    async with connected() as (first, second):
        runtime = real_runtime()
        caller, server = Rpc(first, runtime, SWARM), Rpc(second, runtime, SWARM)
        try:
            yield caller, server
        finally:
            await caller.close()
            await server.close()
            runtime.close()


@on_uvloop
async def test_the_scenario_of_the_simulation_runs_over_real_daemons() -> None:
    async with rpc_pair() as (caller, server):
        ended: list[str] = []
        await serve_scenario(server, ended)

        async def until(condition: Callable[[], bool]) -> None:
            await eventually(lambda: asyncio.sleep(0, condition()))

        await run_scenario(caller, server, ended, until)
        await until(lambda: not [task for task in asyncio.all_tasks() if "Channel" in repr(task.get_coro())])
        for rpc in (caller, server):
            assert rpc.traffic.sent > 0
            assert rpc.traffic.received > 0


@on_uvloop
async def test_a_stopped_process_is_noticed_long_before_a_call_s_deadline() -> None:
    async with loopback_transport() as (_, transport):
        rpc = Rpc(transport, real_runtime(), SWARM)
        with peer_process(SERVER) as (process, told):
            peer = await transport.connect(told["addresses"], 10)
            call = asyncio.create_task(rpc.call(peer, "hang", Nothing(), Nothing, 3600))
            await asyncio.sleep(1)
            assert not call.done()
            os.kill(process.pid, signal.SIGSTOP)
            async with asyncio.timeout(60):
                with pytest.raises(PeerLostError, match="sent nothing"):
                    await call
        await rpc.close()
        rpc.runtime.close()
