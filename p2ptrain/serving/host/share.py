"""The share of time in which a host's batches compute while its peer trains."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

BURST_SECONDS = 1.0
"""Computing after a rest that costs no wait, so that short answers begin at once."""


class ComputeShare:
    """A bucket of seconds of computing. It fills by ``share`` a second, up to `BURST_SECONDS`, and batches empty it.

    A long batch overdraws it, and the next one waits until it is no longer empty. So over t seconds batches take at
    most ``share * t + BURST_SECONDS``, and the one that is under way. Nothing counts while ``is_training`` returns
    False.
    """

    def __init__(self, share: float = 1.0, is_training: Callable[[], bool] = lambda: False) -> None:
        self._share = share
        self._is_training = is_training
        self._seconds = BURST_SECONDS
        self._at = -math.inf

    async def wait(self) -> None:
        """Return once the next batch may begin."""
        while self._fill() <= 0.0:  # noqa: ASYNC110
            await asyncio.sleep(min(BURST_SECONDS, -self._seconds / self._share + 0.001))

    def spend(self, seconds: float) -> None:
        """Count a batch."""
        self._seconds -= seconds
        self._fill()

    def _fill(self) -> float:
        now, before = asyncio.get_running_loop().time(), self._at
        self._at = now
        if self._share < 1.0 and self._is_training():
            self._seconds = min(BURST_SECONDS, self._seconds + self._share * (now - before))
        else:
            self._seconds = BURST_SECONDS
        return self._seconds
