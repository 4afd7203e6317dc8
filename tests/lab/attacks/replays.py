"""Collect tickets and certificates by leading and asking, and play them back to others in later rounds."""

import asyncio
import contextlib

from p2ptrain.averaging.grouping.messages import JOIN, Answer, Join, Refused
from p2ptrain.averaging.protocol.certificate import CHAIN, AskChain, Chain
from p2ptrain.errors import DeadlineError, PeerError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.schema import Nothing
from p2ptrain.training.sync.state_server import HEAD, HeldHead
from tests.lab.stranger import Stranger

MOST_KEPT = 64


async def attack(stranger: Stranger) -> None:
    tickets: list[Join] = []
    old = await stranger.head()

    async def collect(channel: Channel, request: Join) -> None:
        tickets.append(request)
        del tickets[:-MOST_KEPT]
        await channel.send(Refused("collected"))

    async def tell_old_head(peer: str, request: Nothing) -> HeldHead:
        return HeldHead(old)

    async def tell_old_chain(peer: str, request: AskChain) -> Chain:
        return Chain((old.certificate,) if old.certificate else ())

    stranger.act_alive()
    stranger.rpc.serve_channel(JOIN, Join, collect)
    stranger.rpc.serve(HEAD, Nothing, tell_old_head)
    stranger.rpc.serve(CHAIN, AskChain, tell_old_chain)
    async with asyncio.TaskGroup() as tasks:
        # The record promises more than the old certificate proves, so that others ask for it.
        tasks.create_task(stranger.pose(round=old.round + 1000, lineage=old.lineage, lineage_tokens=1 << 60))
        while True:
            for victim in await stranger.victims():
                for ticket in tickets[-8:]:
                    tasks.create_task(_send(stranger, victim, ticket))
            await asyncio.sleep(1.0)


async def _send(stranger: Stranger, victim: str, ticket: Join) -> None:
    with contextlib.suppress(PeerError, DeadlineError):
        async with stranger.rpc.open(victim, JOIN, ticket, 3.0) as channel:
            await channel.receive(Answer, 3.0)
