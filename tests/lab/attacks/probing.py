"""Tell everybody once a second that this peer is in the round, and never join it."""

import asyncio
import contextlib

from p2ptrain.averaging.grouping.leaders import probe
from p2ptrain.errors import DeadlineError, PeerError
from tests.lab.stranger import Stranger


async def attack(stranger: Stranger, closing: bool = False, every_seconds: float = 1.0) -> None:
    while True:
        head = await stranger.head()
        await stranger.pretend(head)
        async with asyncio.TaskGroup() as tasks:
            for victim in await stranger.victims():
                tasks.create_task(_probe(stranger, victim, head, closing))
            tasks.create_task(asyncio.sleep(every_seconds))


async def _probe(stranger: Stranger, victim: str, head: object, closing: bool) -> None:
    with contextlib.suppress(PeerError, DeadlineError):
        await probe(stranger.rpc, victim, stranger.key_of(head, victim), 3.0, closing=closing)  # type: ignore[arg-type]
