"""Announce a state of nearly a TiB, with a certificate of this peer's own, and send chunks while anybody takes them."""

import asyncio

from p2ptrain.network.chunks.messages import Ask, FromReceiver, Open, service
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.training.state.digest import Description, TensorSpec, specs_of
from p2ptrain.training.sync.state_server import STATE, HeldState
from tests.lab.stranger import Stranger


async def attack(stranger: Stranger, state_bytes: int = (1 << 40) - (1 << 30)) -> None:
    state = await stranger.promise()
    vector, *rest = specs_of(state.tensors())
    specs = TensorSpec(vector.name, vector.dtype, (state_bytes // 4,)), *rest

    async def send(channel: Channel, request: Open) -> None:
        await channel.send(HeldState(state.layout.fingerprint, Description(specs)))
        while True:
            match await channel.receive(FromReceiver, 60.0):
                case Ask(chunks):
                    for _ in chunks:
                        await channel.send_bytes(bytes(1 << 20))
                case _:
                    return

    stranger.rpc.serve_channel(service(STATE), Open, send)
    while True:
        await stranger.pretend(state.head)
        await asyncio.sleep(3.0)
