"""Be ahead of all, and send the state so slowly that a download would take for ever."""

import asyncio

from p2ptrain.network.chunks.messages import Open, service
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.training.state.digest import Description, specs_of
from p2ptrain.training.sync.state_server import STATE, HeldState
from tests.lab.stranger import Stranger


async def attack(stranger: Stranger, every_seconds: float = 5.0) -> None:
    state = await stranger.promise()

    async def dribble(channel: Channel, request: Open) -> None:
        await channel.send(HeldState(state.layout.fingerprint, Description(specs_of(state.tensors()))))
        while True:  # Bytes of one chunk come one at a time, so that the stream never falls silent.
            await channel._stream.write(b"\0\0\0\1\2\0")  # A frame of bulk data of one byte.
            await asyncio.sleep(every_seconds)

    stranger.rpc.serve_channel(service(STATE), Open, dribble)
    while True:
        await stranger.pretend(state.head)
        await asyncio.sleep(3.0)
