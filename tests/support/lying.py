"""Channels that change what is sent on them, below the protocol code that would never say so."""

from collections.abc import Callable
from typing import Any

from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.schema import to_wire

Message = dict[str, Any]
Lie = Callable[[str, Message], Message]
"""(receiver, message) -> what is sent instead."""
BulkLie = Callable[[bytes], bytes]


class LyingChannel:
    def __init__(
        self, channel: Channel, lie: Lie = lambda to, message: message, bulk_lie: BulkLie = lambda data: data
    ) -> None:
        self._channel = channel
        self._lie = lie
        self._bulk_lie = bulk_lie

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def send(self, message: object) -> None:
        await self._channel.send(self._lie(self._channel.remote, to_wire(message)))

    async def send_bytes(self, data: bytes, **options: Any) -> None:
        await self._channel.send_bytes(self._bulk_lie(bytes(data)), **options)
