"""Rate limits for the bandwidth of a peer: one `RateLimit` per direction, shared by all channels.

The limit is a token bucket in its virtual scheduling form (GCRA, ITU-T I.371). It tracks the time at which all
admitted bytes would have passed at the given rate. A transfer ahead of that by more than a burst waits. The order is
first come, first served, with one frame or piece per channel, so channels take turns.
"""

from __future__ import annotations

import asyncio

BURST_SECONDS = 0.2
"""How far traffic may run ahead of the average rate."""


class RateLimit:
    """Delays senders or receivers to keep an average rate; 0 sets no limit."""

    def __init__(self, bytes_per_second: int = 0) -> None:
        if bytes_per_second < 0:
            raise ValueError(f"bytes_per_second is {bytes_per_second}, expected 0 (no limit) or more")
        self._bytes_per_second = bytes_per_second
        self._through_at = 0.0

    async def take(self, num_bytes: int) -> None:
        """Wait until ``num_bytes`` more may pass; a cancelled wait still consumes them."""
        if not self._bytes_per_second:
            return
        now = asyncio.get_running_loop().time()
        self._through_at = max(self._through_at, now) + num_bytes / self._bytes_per_second
        wait_seconds = self._through_at - now - BURST_SECONDS
        if wait_seconds > 0:
            await asyncio.sleep(wait_seconds)


class Traffic:
    """Byte counts and rate limits of a peer's frames in both directions; counts include frame headers."""

    def __init__(self, up: RateLimit | None = None, down: RateLimit | None = None) -> None:
        self.sent = 0
        self.received = 0
        self.up = up or RateLimit()
        self.down = down or RateLimit()
