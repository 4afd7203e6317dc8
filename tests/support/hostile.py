"""Trainers that lie: what they send is changed on its way out, below the protocol code that would never say so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from p2ptrain.network.channel import Channel
from tests.support.trainers import SimulatedTrainer

Message = dict[str, Any]
Lie = Callable[[str, Message], Message]
"""(receiver, message) -> what is sent instead."""
BulkLie = Callable[[bytes], bytes]


class LyingChannel:
    """A channel that changes what its owner sends."""

    def __init__(self, channel: Channel, lie: Lie, bulk_lie: BulkLie) -> None:
        self._channel = channel
        self._lie = lie
        self._bulk_lie = bulk_lie

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def send(self, message: Message) -> None:
        """Send something else."""
        await self._channel.send(self._lie(self._channel.remote, message))

    async def send_bytes(self, data: bytes, **options: Any) -> None:
        """Send other bytes."""
        await self._channel.send_bytes(self._bulk_lie(bytes(data)), **options)


def lie_in_rounds(
    trainer: SimulatedTrainer, lie: Lie = lambda to, message: message, bulk_lie: BulkLie = lambda data: data
) -> None:
    """Change what a trainer sends in butterflies, on the streams that it opens and on those that it serves."""
    serve, open_ = trainer.sync.averager._attempts._serve_butterfly, trainer.rpc.open

    async def lying_serve(channel: Channel, request: Message) -> None:
        await serve(LyingChannel(channel, lie, bulk_lie), request)  # type: ignore[arg-type]

    @asynccontextmanager
    async def lying_open(
        peer: str, name: str, request: Message, timeout_seconds: float, **options: Any
    ) -> AsyncIterator[Any]:
        async with open_(peer, name, request, timeout_seconds, **options) as channel:
            yield LyingChannel(channel, lie, bulk_lie) if name == "butterfly" else channel

    def opened(*args: Any, **options: Any) -> AbstractAsyncContextManager[Any]:
        return lying_open(*args, **options)

    trainer.rpc.serve_channel("butterfly", lying_serve)
    trainer.rpc.open = opened  # type: ignore[method-assign]


def lead_badly(trainer: SimulatedTrainer, answer: Callable[[list[Message], Message], Awaitable[Message]]) -> list[str]:
    """Answer every ticket with ``answer(all requests so far, this one)``; the list fills with who asked."""
    asked: list[str] = []
    requests: list[Message] = []

    async def join(channel: Channel, request: Message) -> None:
        asked.append(channel.remote)
        requests.append(request)
        reply = await answer(requests, request)
        await channel.send(reply)

    trainer.rpc.serve_channel("rally.join", join)
    return asked


async def never(*args: object) -> Any:
    """Does not answer in any deadline's time."""
    await asyncio.sleep(3600)
