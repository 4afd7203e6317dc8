"""A peer's totals of served requests, with latencies as mergeable histograms.

Percentiles of several peers or intervals do not average, but histograms add up. The buckets have eight bounds per
decade, so a percentile within them is off by a third at most.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from operator import mul
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from p2ptrain.network.schema import Amount, Count, Hash

BOUNDS = tuple(float(f"{10 ** (step / 8):.3g}") for step in range(-24, 25))
"""Upper bounds of the buckets, in seconds, from 1 ms to 1,000 s; one more bucket holds longer latencies."""
MAX_TOTAL = 1 << 48
"""Bound of all counters; a million tokens per second take nine years to reach it."""
MAX_SESSIONS = 1_000_000
MAX_VERSIONS = 4
MAX_STEP_SECONDS = 60.0
NO_COUNTS = (0,) * (len(BOUNDS) + 1)
Total = Annotated[int, Meta(ge=0, le=MAX_TOTAL)]
StepSeconds = Annotated[float, Meta(ge=0.0, le=MAX_STEP_SECONDS)]
_TOLERANCE = 1e-3
"""Relative tolerance for sums in floating point."""


@dataclass(frozen=True)
class Latencies:
    """A histogram of latencies.

    Attributes:
        counts: Per bucket: up to each of `BOUNDS`, and above the last.
        seconds: The sum of all samples.
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
        """Return the difference to ``before``; None if a counter decreased."""
        counts = tuple(mine - its for mine, its in zip(self.counts, before.counts, strict=True))
        seconds = self.seconds - before.seconds
        if min(counts) < 0 or seconds < -_TOLERANCE * before.seconds:
            return None
        return Latencies(counts, max(0.0, seconds))

    def quantile(self, share: float) -> float | None:
        """Return a quantile in seconds; None without samples.

        The quantile is interpolated logarithmically within its bucket, and linearly within the first. Above the last
        bound it is that bound.
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
    """Return `Latencies.counts` as Prometheus buckets: pairs of an upper bound and a cumulative count."""
    return list(zip([*map(str, BOUNDS), "+Inf"], accumulate(counts), strict=True))


@dataclass(frozen=True)
class ServingTotals:
    """Totals of served requests over some time.

    Attributes:
        requests: Accepted requests, failed ones included.
        first_token: Times from a request's arrival to its first token.
        token: Times between consecutive tokens of a request.
        cached_tokens: Tokens of prompts whose rows were in prefix pages.
        drafted_tokens, accepted_tokens: Drafts of hosts of the first stage, and those that were drawn then.
    """

    requests: Total = 0
    failed_requests: Total = 0
    generated_tokens: Total = 0
    prompt_tokens: Total = 0
    first_token: Latencies = Latencies()
    token: Latencies = Latencies()
    cached_tokens: Total = 0
    drafted_tokens: Total = 0
    accepted_tokens: Total = 0

    def __add__(self, other: ServingTotals) -> ServingTotals:
        return ServingTotals(*(mine + its for mine, its in self._beside(other)))

    def since(self, before: ServingTotals) -> ServingTotals | None:
        """Return the difference to ``before``; None if a counter decreased."""
        grown: list[Any] = [
            now.since(then) if isinstance(now, Latencies) else now - then for now, then in self._beside(before)
        ]
        is_decreased = any(each is None or (isinstance(each, int) and each < 0) for each in grown)
        return None if is_decreased else ServingTotals(*grown)

    def _beside(self, other: ServingTotals) -> Iterator[tuple[Any, Any]]:
        """Yield the values of each field in both."""
        return ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))


class ServedStage(msgspec.Struct, frozen=True, array_like=True):
    """A stage that a peer serves.

    Attributes:
        num_stages: Of the whole model.
        versions: Round and digest of each version of the weights, 32 bytes.
        arithmetic: See `p2ptrain.models.exact`.
        context: Most positions of a session.
        free_pages: Pages for keys and values, of 64 positions each.
        sessions: Open now.
        grammars: Id of the engine for answers in a given form; empty if the peer has none, or not the last stage.
        pages: All of its pages, free or not.
        base_seconds, row_seconds: Of a batch, as the peer measures them; 0 while it does not know.
    """

    stage: Count
    num_stages: Count
    versions: Annotated[tuple[tuple[Count, Hash], ...], Meta(max_length=MAX_VERSIONS)]
    arithmetic: Annotated[str, Meta(max_length=64)]
    context: Count
    free_pages: Count = 0
    sessions: Count = 0
    grammars: Annotated[str, Meta(max_length=64)] = ""
    pages: Count = 0
    base_seconds: StepSeconds = 0.0
    row_seconds: StepSeconds = 0.0


@dataclass(frozen=True)
class ServingReport:
    """A serving peer's open sessions (generations), its totals since it started, and the stage that it serves."""

    sessions: Annotated[int, Meta(ge=0, le=MAX_SESSIONS)]
    totals: ServingTotals
    served: ServedStage | None = None

    def __post_init__(self) -> None:
        totals = self.totals
        _expect(totals.failed_requests <= totals.requests, "more requests failed than there were")
        _expect(totals.cached_tokens <= totals.prompt_tokens, "more cached tokens than prompts had")
        _expect(totals.accepted_tokens <= totals.drafted_tokens, "more drafts were accepted than there were")
        _expect(totals.first_token.total <= totals.requests, "more first tokens than requests")
        _expect(totals.token.total <= totals.generated_tokens, "more tokens were timed than generated")
        for latencies in (totals.first_token, totals.token):
            # A sum outside the bounds that its counts imply would distort the mean.
            counts, exceeds = latencies.counts, latencies.counts[-1]
            least = math.fsum(count * low for count, low in zip(counts, (0.0, *BOUNDS), strict=True))
            most = math.inf if exceeds else math.fsum(map(mul, counts, BOUNDS))
            is_possible = least * (1 - _TOLERANCE) <= latencies.seconds <= most * (1 + _TOLERANCE)
            _expect(is_possible, "a sum of seconds that its counts rule out")


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
