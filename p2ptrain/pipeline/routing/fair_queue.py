"""Bulk data to one peer goes a little at a time, in the order in which it became ready.

Streams share a link fairly. If all that a host has for the next one goes at once, all of it arrives at about the same
time, late: microbatches bunch together, and while one link is crowded the next one idles. In turns the first arrives
while the last still waits, and links and devices behind it have work. So much goes at a time that a long fast link
stays full; a peer that takes nothing holds up only what is for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

WINDOW_BYTES = 24 << 20
"""Under way to one peer. A link of 500 Mbit/s, half of which is for the stage before, holds 6 MB in 200 ms; with less
than four times that it idles now and then, and with more microbatches bunch (`python -m benchmarks.bench_pipeline`)."""


@dataclass
class _Lane:
    """The queue to one peer: bytes under way, and those that wait."""

    num_bytes: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)

    def advance(self, window_bytes: int) -> None:
        """Start as many as have room; one always has."""
        while self.waiting:
            size, turn = self.waiting[0]
            if self.num_bytes and self.num_bytes + size > window_bytes:
                return
            self.waiting.popleft()
            if not turn.done():
                self.num_bytes += size
                turn.set_result(None)


class SendWindow:
    """Of one peer, for what it sends to others.

    Args:
        window_bytes: Under way to one peer at a time.
    """

    def __init__(self, window_bytes: int = WINDOW_BYTES) -> None:
        self._window_bytes = window_bytes
        self._lanes: dict[str, _Lane] = {}

    @asynccontextmanager
    async def to(self, peer: str, num_bytes: int) -> AsyncIterator[None]:
        """Wait for the turn of so many bytes; they are under way until the end of the block."""
        lane = self._lanes.setdefault(peer, _Lane())
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        lane.waiting.append((num_bytes, turn))
        lane.advance(self._window_bytes)
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                lane.num_bytes -= num_bytes
            turn.cancel()
            lane.advance(self._window_bytes)
            if not lane.num_bytes and not lane.waiting:
                self._lanes.pop(peer, None)
