"""How fast a swarm trains, and amounts that add up to rates."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

RATE_SECONDS = 15.0


class Amount(NamedTuple):
    """So much within so many seconds: its mean over longer times is their sum by theirs, however long each is."""

    total: float
    seconds: float


class TokenRate:
    """Tokens in committed rounds over time, so that every peer's share is in it once.

    The average is taken over the last 15 s, and always over a whole number of rounds, at least one: whatever rounds
    last, it neither jumps nor drops to 0 between them.
    """

    def __init__(self) -> None:
        self._commits: deque[tuple[float, int]] = deque()
        self._tokens: int | None = None

    def update(self, now: float, tokens: int) -> None:
        """Learn how many tokens the swarm's rounds have at time ``now``, in seconds of any clock."""
        if self._tokens is not None and tokens < self._tokens:
            self._commits.clear()  # The lineage that was ahead is gone.
        if tokens > self._tokens if self._tokens is not None else not tokens:
            self._commits.append((now, tokens))  # Not at a first look in the middle of some later round.
        self._tokens = tokens
        while len(self._commits) > 2 and self._commits[-1][0] - self._commits[1][0] >= RATE_SECONDS:
            self._commits.popleft()

    @property
    def tokens_per_second(self) -> float | None:
        """None before a round was seen from its start to its end."""
        if len(self._commits) < 2:
            return None
        (first, before), (last, after) = self._commits[0], self._commits[-1]
        return (after - before) / max(last - first, 1e-9)
