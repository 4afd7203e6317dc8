"""Lead whenever it is this peer's turn, keep all members waiting with keepalives, and never form a group."""

import asyncio

from p2ptrain.averaging.grouping.messages import JOIN, Join, Waiting
from p2ptrain.averaging.timing.deadlines import keepalive_seconds
from p2ptrain.network.rpc.channel import Channel
from tests.lab.stranger import Stranger


async def attack(stranger: Stranger) -> None:
    pause = keepalive_seconds(stranger.manifest.averaging.grace_seconds)

    async def keep_waiting(channel: Channel, request: Join) -> None:
        while True:
            await channel.send(Waiting(joined=True))
            await asyncio.sleep(pause)

    stranger.act_alive()
    stranger.rpc.serve_channel(JOIN, Join, keep_waiting)
    await stranger.pose()
