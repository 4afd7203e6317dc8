"""Lead, and never form a group: say nothing, or keep all waiting with keepalives."""

import asyncio

from p2ptrain.averaging.grouping.messages import Waiting
from p2ptrain.averaging.protocol.certificate import Ticket
from p2ptrain.averaging.timing.deadlines import keepalive_seconds
from p2ptrain.network.rpc.channel import Channel
from tests.lab.stranger import Member, forever


async def attack(member: Member, keepalives: bool = False) -> None:
    pause = keepalive_seconds(member.manifest.averaging.grace_seconds)

    async def hang(channel: Channel, ticket: Ticket) -> None:
        while True:
            if keepalives:
                await channel.send(Waiting(joined=True))
            await asyncio.sleep(pause)

    member.lead(hang)
    await forever()
