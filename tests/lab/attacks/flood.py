"""Open as many streams as the victims take and keep them open; each asks for something that costs its victim work."""

import asyncio
import contextlib

from p2ptrain.averaging.protocol.certificate import CHAIN, AskChain, Chain
from p2ptrain.errors import DeadlineError, PeerError, ProtocolError
from p2ptrain.network.chunks.messages import Ask, Open, service
from p2ptrain.network.schema import Nothing
from p2ptrain.training.sync.state_server import HEAD, STATE, HeldHead
from tests.lab.stranger import Stranger, forever


async def attack(stranger: Stranger, streams: int = 40) -> None:
    async with asyncio.TaskGroup() as tasks:
        for victim in await stranger.victims():
            for number in range(streams):
                tasks.create_task((_download, _call)[number % 2](stranger, victim))
        await forever()


async def _call(stranger: Stranger, victim: str) -> None:
    while True:
        with contextlib.suppress(PeerError, DeadlineError):
            await stranger.rpc.call(victim, HEAD, Nothing(), HeldHead, 10.0)
            await stranger.rpc.call(victim, CHAIN, AskChain((), True), Chain, 10.0)
        await asyncio.sleep(0.5)


async def _download(stranger: Stranger, victim: str) -> None:
    while True:
        with contextlib.suppress(PeerError, DeadlineError, ProtocolError):
            async with stranger.rpc.open(victim, service(STATE), Open(), 10.0) as channel:
                await channel.send(Ask([0] * 16))
                await asyncio.sleep(30.0)  # It reads nothing of what it asked for.
        await asyncio.sleep(0.5)
