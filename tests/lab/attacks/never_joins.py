"""Report steps and answer probes as a trainer, and never hand in a ticket to another leader."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from p2ptrain.averaging.grouping.messages import JOIN
from p2ptrain.network.rpc.channel import Channel
from tests.lab.stranger import Member, forever


async def attack(member: Member) -> None:
    open_ = member.rpc.open

    @contextlib.asynccontextmanager
    async def open_or_hang(peer: str, name: str, *rest: Any, **options: Any) -> AsyncIterator[Channel]:
        if name == JOIN:
            await forever()
        async with open_(peer, name, *rest, **options) as channel:
            yield channel

    member.rpc.open = open_or_hang  # type: ignore[method-assign]
    await forever()
