"""Simulated peers with an `Rpc` each, for tests of protocol code."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.simulated import SimulatedNetwork, SimulatedPeer

SWARM = b"\x07" * 32


@dataclass
class Member:
    peer: SimulatedPeer
    rpc: Rpc


async def start_member(peer: SimulatedPeer, up: float = 0.0, down: float = 0.0) -> Member:
    rpc = Rpc(peer.transport, peer.runtime, SWARM, up, down)
    await rpc.start()
    return Member(peer, rpc)


@asynccontextmanager
async def members(network: SimulatedNetwork, num_peers: int) -> AsyncIterator[list[Member]]:
    """Start ``num_peers`` peers called ``peer0``…; close those that still live at the end."""
    started = [await start_member(network.add_peer(f"peer{i}")) for i in range(num_peers)]
    try:
        yield started
    finally:
        await end_members(network, started)


async def end_members(network: SimulatedNetwork, started: Iterable[Member]) -> None:
    """Close those that still live, stopped ones, too."""
    for member in started:
        if member.peer.alive:
            network.resume(member.peer)
            await member.rpc.close()
            await member.peer.close()


async def until(condition: Callable[[], bool], timeout_seconds: float = 60.0, step_seconds: float = 0.01) -> float:
    """Wait until ``condition()``; returns the seconds that took, and raises `TimeoutError` when it never is."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    async with asyncio.timeout(timeout_seconds):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(step_seconds)
    return loop.time() - start
