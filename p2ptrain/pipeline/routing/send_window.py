"""Send window for bulk data: transfers to one peer start in the order in which they became ready.

Streams share a link fairly, so concurrent transfers all finish late, and later links and devices idle. In turns, the
first transfer arrives while the last one waits. The window fills a long fast link, and a stalled peer delays only its
own data.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

WINDOW_BYTES = 24 << 20
"""Bytes in flight to one peer: four times the bandwidth-delay product of 250 Mbit/s and 200 ms. A smaller window lets
that link idle; with a larger one microbatches bunch (`python -m benchmarks.bench_pipeline`)."""


@dataclass
class _Lane:
    """The queue to one peer; ``num_bytes`` are in flight."""

    num_bytes: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)

    def advance(self, window_bytes: int) -> None:
        """Start the transfers that fit; an idle lane always starts one."""
        while self.waiting:
            size, turn = self.waiting[0]
            if self.num_bytes and self.num_bytes + size > window_bytes:
                return
            self.waiting.popleft()
            if not turn.done():
                self.num_bytes += size
                turn.set_result(None)


class SendWindow:
    """Bounds one sender's bytes in flight to each peer."""

    def __init__(self, window_bytes: int = WINDOW_BYTES) -> None:
        self._window_bytes = window_bytes
        self._lanes: dict[str, _Lane] = {}

    @asynccontextmanager
    async def to(self, peer: str, num_bytes: int) -> AsyncIterator[None]:
        """Wait for a turn; the bytes are in flight until the end of the block."""
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
