"""A peer's totals of served requests since it started, with latencies that can be added up.

Percentiles of several peers, or of several minutes, do not average. So a peer sends how many of its latencies fell
between fixed bounds, and whoever reads adds the counts of all and takes percentiles of the sum. There are eight bounds
for each power of ten, so that a percentile is off by a third at most.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Annotated

from msgspec import Meta

from p2ptrain.network.schema import Amount

BOUNDS = tuple(float(f"{10 ** (step / 8):.3g}") for step in range(-24, 25))
"""Upper bounds of all counts but the last, in seconds, from 1 ms to 1,000 s; what is above has the last one."""
MAX_TOTAL = 1 << 48
"""A million tokens per second for nine years."""
MAX_SESSIONS = 1_000_000
NO_COUNTS = (0,) * (len(BOUNDS) + 1)
Total = Annotated[int, Meta(ge=0, le=MAX_TOTAL)]
_TOLERANCE = 1e-3
"""Of sums in floating point."""


@dataclass(frozen=True)
class Latencies:
    """A histogram of latencies.

    Attributes:
        counts: Up to each of `BOUNDS` and above the one before; the last one is of what is above all of them.
        seconds: The sum of all.
    """

    counts: Annotated[tuple[Total, ...], Meta(min_length=len(BOUNDS) + 1, max_length=len(BOUNDS) + 1)] = NO_COUNTS
    seconds: Amount = 0.0

    @classmethod
    def of(cls, samples: Iterable[float]) -> Latencies:
        """Count samples, in seconds; negative ones count as 0."""
        counts, seconds = [0] * (len(BOUNDS) + 1), 0.0
        for sample in samples:
            counts[bisect_left(BOUNDS, sample)] += 1
            seconds += max(0.0, sample)
        return cls(tuple(counts), seconds)

    @property
    def total(self) -> int:
        return sum(self.counts)

    def __add__(self, other: Latencies) -> Latencies:
        counts = tuple(mine + its for mine, its in zip(self.counts, other.counts, strict=True))
        return Latencies(counts, self.seconds + other.seconds)

    def since(self, before: Latencies) -> Latencies | None:
        """Return the difference to ``before``; None where something became less."""
        counts = tuple(mine - its for mine, its in zip(self.counts, before.counts, strict=True))
        seconds = self.seconds - before.seconds
        if min(counts) < 0 or seconds < -_TOLERANCE * before.seconds:
            return None
        return Latencies(counts, max(0.0, seconds))

    def quantile(self, share: float) -> float | None:
        """Return the latency that a share of samples did not exceed, in seconds; None without samples.

        Within the bounds between which it lies it is interpolated as if logarithms were spread evenly there. Above all
        bounds it is the last one.
        """
        rank, below = share * self.total, 0
        if not self.total:
            return None
        for index, count in enumerate(self.counts[:-1]):
            if count and below + count >= rank:
                low, high = (BOUNDS[index - 1] if index else 0.0), BOUNDS[index]
                part = max(0.0, rank - below) / count
                return low * (high / low) ** part if low else high * part
            below += count
        return BOUNDS[-1]


def cumulative(counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return buckets as Prometheus has them: under each of `BOUNDS`, the count of samples up to it.

    Args:
        counts: As `Latencies.counts`.
    """
    return list(zip([*map(str, BOUNDS), "+Inf"], accumulate(counts), strict=True))


@dataclass(frozen=True)
class ServingTotals:
    """Totals since some moment.

    Attributes:
        requests: That were accepted, ``failed_requests`` among them.
        generated_tokens: That went out; ``prompt_tokens``: that came in.
        first_token: For each request that got one, the time from its arrival to its first token.
        token: For each further token, the time since the one before.
    """

    requests: Total = 0
    failed_requests: Total = 0
    generated_tokens: Total = 0
    prompt_tokens: Total = 0
    first_token: Latencies = Latencies()
    token: Latencies = Latencies()

    def __add__(self, other: ServingTotals) -> ServingTotals:
        return ServingTotals(
            self.requests + other.requests, self.failed_requests + other.failed_requests,
            self.generated_tokens + other.generated_tokens, self.prompt_tokens + other.prompt_tokens,
            self.first_token + other.first_token, self.token + other.token,
        )  # fmt: skip

    def since(self, before: ServingTotals) -> ServingTotals | None:
        """Return the difference to ``before``; None where something became less."""
        first_token, token = self.first_token.since(before.first_token), self.token.since(before.token)
        if first_token is None or token is None:
            return None
        grown = ServingTotals(
            self.requests - before.requests, self.failed_requests - before.failed_requests,
            self.generated_tokens - before.generated_tokens, self.prompt_tokens - before.prompt_tokens,
            first_token, token,
        )  # fmt: skip
        counts = (grown.requests, grown.failed_requests, grown.generated_tokens, grown.prompt_tokens)
        return grown if min(counts) >= 0 else None


@dataclass(frozen=True)
class ServingReport:
    """A serving peer's part of its record.

    Attributes:
        sessions: Generations that are open now.
        totals: Since it started.
    """

    sessions: Annotated[int, Meta(ge=0, le=MAX_SESSIONS)]
    totals: ServingTotals

    def __post_init__(self) -> None:
        totals = self.totals
        _expect(totals.failed_requests <= totals.requests, "more requests failed than there were")
        _expect(totals.first_token.total <= totals.requests, "more first tokens than requests")
        _expect(totals.token.total <= totals.generated_tokens, "more tokens were timed than generated")
        for latencies in (totals.first_token, totals.token):
            # A sum that its own counts rule out would only bend the mean.
            counts, exceeds = latencies.counts, latencies.counts[-1]
            least = math.fsum(count * low for count, low in zip(counts, (0.0, *BOUNDS), strict=True))
            most = math.inf if exceeds else math.fsum(map(mul, counts, BOUNDS))
            is_possible = least * (1 - _TOLERANCE) <= latencies.seconds <= most * (1 + _TOLERANCE)
            _expect(is_possible, "a sum of seconds that its counts rule out")


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
