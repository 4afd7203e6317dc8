"""State that is slow to download."""

from collections.abc import Awaitable, Callable
from typing import Any
from weakref import WeakKeyDictionary

from p2ptrain.network.rpc.frames import RateLimit
from p2ptrain.training.sync.state_server import StateServer


def slow_read(bytes_per_second: float) -> Callable[..., Awaitable[int]]:
    """A `StateServer.read` that keeps each server to a rate, over all of its downloads together."""
    read, limits = StateServer.read, WeakKeyDictionary[StateServer, RateLimit]()

    async def limited(server: StateServer, *arguments: Any) -> int:
        size = await read(server, *arguments)
        await limits.setdefault(server, RateLimit(bytes_per_second)).take(size)
        return size

    return limited
