"""Tell everybody once a second that this peer is in the round, and never join it."""

import asyncio

from tests.lab.stranger import Stranger


async def attack(stranger: Stranger, closing: bool = False, every_seconds: float = 1.0) -> None:
    while True:
        head = await stranger.head()
        await stranger.pretend(head)
        async with asyncio.TaskGroup() as tasks:
            for victim in await stranger.victims():
                tasks.create_task(stranger.probe(victim, head, closing))
            tasks.create_task(asyncio.sleep(every_seconds))
