"""Two peers and a channel between them, for tests of channels and of what they are made of."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.endpoint import PROTOCOL
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.network.transport import Stream
from tests.support.sim.peers import Member, members, until

Server = Callable[[Channel], Awaitable[None]]


@asynccontextmanager
async def talkers(network: SimulatedNetwork, server: Server) -> AsyncIterator[tuple[Member, Member]]:
    """Two peers; the second runs ``server`` on its end of each channel that is opened to it for ``talk``."""
    async with members(network, 2) as (caller, other):

        async def serve(channel: Channel, request: dict[str, Any]) -> None:
            await server(channel)

        other.rpc.serve_channel("talk", dict, serve)
        yield caller, other


@asynccontextmanager
async def conversation(network: SimulatedNetwork, server: Server) -> AsyncIterator[tuple[Channel, Member, Member]]:
    """A channel to a peer that runs ``server`` on its end."""
    async with talkers(network, server) as (caller, other):
        async with caller.rpc.open(other.rpc.peer_id, "talk", {}, 5) as channel:
            yield channel, caller, other
        await until(lambda: other.rpc.inbound.total() == 0, 3700)


@asynccontextmanager
async def against(network: SimulatedNetwork, server: Callable[[Stream], Awaitable[None]]) -> AsyncIterator[Channel]:
    """A channel to a peer that does with the raw stream whatever ``server`` does."""
    async with members(network, 2) as (caller, other):
        await other.peer.transport.serve(PROTOCOL, server)
        async with caller.rpc.open(other.rpc.peer_id, "talk", {}, 5) as channel:
            yield channel
