"""Bandwidth that a peer is allowed to use: one `RateLimit` for all channels in one direction.

A token bucket in the form of the virtual scheduling algorithm (GCRA, ITU-T I.371): it keeps the time at which all that
was let through so far would be through at the given rate, and holds back whoever comes more than a burst before that.
Who comes first goes first; what waits is one frame or piece per channel, so channels take turns.
"""

from __future__ import annotations

import asyncio

BURST_SECONDS = 0.2
"""How far the allowed average may be run ahead of."""


class RateLimit:
    """Holds senders or receivers back to a rate.

    Args:
        bytes_per_second: What is allowed on average; 0 sets no limit.
    """

    def __init__(self, bytes_per_second: int = 0) -> None:
        if bytes_per_second < 0:
            raise ValueError(f"bytes_per_second is {bytes_per_second}, expected 0 (no limit) or more")
        self._bytes_per_second = bytes_per_second
        self._through_at = 0.0

    async def take(self, num_bytes: int) -> None:
        """Wait until ``num_bytes`` more may pass; what was taken stays taken when the wait is cancelled."""
        if not self._bytes_per_second:
            return
        now = asyncio.get_running_loop().time()
        self._through_at = max(self._through_at, now) + num_bytes / self._bytes_per_second
        wait_seconds = self._through_at - now - BURST_SECONDS
        if wait_seconds > 0:
            await asyncio.sleep(wait_seconds)


class Traffic:
    """Bytes of all frames that a peer wrote and read, headers included, and how fast it may write and read them."""

    def __init__(self, up: RateLimit | None = None, down: RateLimit | None = None) -> None:
        self.sent = 0
        self.received = 0
        self.up = up or RateLimit()
        self.down = down or RateLimit()
