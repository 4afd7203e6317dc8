"""Publish the records of peers that do not exist, each with a key of its own."""

import asyncio

from tests.lab.stranger import Stranger


async def attack(stranger: Stranger, count: int = 500) -> None:
    keys = [stranger.new_signer() for _ in range(count)]
    while True:
        head = await stranger.head()
        for key in keys:
            await stranger.pretend(head, key)
        await asyncio.sleep(1.0)
