"""Serving totals of a swarm over time, with rates and percentiles.

Peers publish totals since their start (`p2ptrain.network.records.serving`). The sum of these would fall when a peer
leaves. So `ServingBook` adds up each total's growth from record to record. A restarted peer counts from 0 again. A peer
that was absent at the last look counts from then on, since its earlier totals may be counted already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from p2ptrain.network.records.record import PeerRecord, Sighting
from p2ptrain.network.records.serving import BOUNDS, Latencies, ServingTotals
from p2ptrain.status.views import Percentiles, ServingView

WINDOW_SECONDS = 60.0
"""Window of current rates and percentiles."""
MAX_TOKENS_PER_SECOND = 1e6
MAX_PROMPT_TOKENS_PER_SECOND = 1e7
MAX_REQUESTS_PER_SECOND = 1e5
"""Limits for one peer; greater growth is not counted."""
SLACK_SECONDS = 5.0
"""Tolerance in the time between two records."""
NONE = ServingTotals()


class Amount(NamedTuple):
    """A total and its duration; both add up, so that rates average correctly."""

    total: float
    seconds: float


Value = float | Amount | Latencies
"""A value in the history."""


@dataclass(frozen=True)
class Served:
    """The known totals of a swarm.

    Attributes:
        totals: Since the monitor's start.
        recent: Part of ``totals`` from the last ``seconds``, which are 0 before the second look.
    """

    totals: ServingTotals = NONE
    recent: ServingTotals = NONE
    seconds: float = 0.0


NOTHING = Served()


def totals_of(record: PeerRecord) -> ServingTotals:
    return record.serving.totals if record.serving is not None else NONE


def growth(before: Sighting, after: Sighting) -> ServingTotals | None:
    """Return the growth between two records of a peer; None if it is not credible."""
    totals, seconds = totals_of(after.record), max(0.0, after.at - before.at) + SLACK_SECONDS
    is_same_life = after.record.started_at == before.record.started_at
    grown = totals.since(totals_of(before.record)) if is_same_life else totals
    if (
        grown is None
        or grown.generated_tokens > MAX_TOKENS_PER_SECOND * seconds
        or grown.prompt_tokens > MAX_PROMPT_TOKENS_PER_SECOND * seconds
        or grown.requests > MAX_REQUESTS_PER_SECOND * seconds
    ):
        return None
    return grown


class ServingBook:
    """Sum of the served totals over successive looks; ``rejected`` counts reports with growth that is not credible."""

    def __init__(self) -> None:
        self.rejected = 0
        self._known: dict[str, Sighting] = {}
        self._past: deque[tuple[float, ServingTotals]] = deque()
        self._totals = NONE
        self._point: tuple[float, ServingTotals] | None = None

    def learn(self, sightings: Sequence[Sighting], now: float) -> None:
        """Add the growth in the records of a look at second ``now``."""
        before, self._known = self._known, {}
        for seen in sightings:
            peer = seen.record.peer
            known = before.get(peer)
            if known is None:
                self._known[peer] = seen
            else:
                self._known[peer] = known if known.at >= seen.at else self._add(known, seen)
        self._past.append((now, self._totals))
        while len(self._past) > 2 and self._past[1][0] <= now - WINDOW_SECONDS:
            self._past.popleft()

    def _add(self, known: Sighting, seen: Sighting) -> Sighting:
        """Add a peer's growth; return the sighting with which its next one is compared."""
        is_same_life = known.record.started_at == seen.record.started_at
        if is_same_life and seen.record.serving is None:
            return _with_totals_of(known, seen)
        grown = growth(known, seen)
        if grown is None:
            self.rejected += 1
            is_less = totals_of(seen.record).since(totals_of(known.record)) is None
            # Counting down and up again adds nothing.
            return _with_totals_of(known, seen) if is_same_life and is_less else seen
        if grown != NONE:
            self._totals += grown
        return seen

    def served(self) -> Served:
        """Return the totals as of the last look."""
        if not self._past:
            return NOTHING
        (first, before), (last, after) = self._past[0], self._past[-1]
        return Served(after, after.since(before) or NONE, last - first)

    def take_point(self, now: float, sessions: int | None) -> dict[str, Value]:
        """Return the history's values since the last call, by series.

        ``sessions`` is the number of open sessions; None if no peer serves.
        """
        before, self._point = self._point, (now, self._totals)
        if before is None or now <= before[0]:
            return {}
        grown = self._totals.since(before[1]) or NONE
        if sessions is None and grown == NONE:
            return {}
        return {
            "served_tokens_per_second": Amount(grown.generated_tokens, now - before[0]),
            "served_prompt_tokens_per_second": Amount(grown.prompt_tokens, now - before[0]),
            "served_requests": float(grown.requests),
            "served_failures": float(grown.failed_requests),
            "first_token_seconds": grown.first_token,
            "token_seconds": grown.token,
            **({"sessions": float(sessions)} if sessions is not None else {}),
        }


def _with_totals_of(known: Sighting, seen: Sighting) -> Sighting:
    if known.record.serving is seen.record.serving:
        return seen
    return replace(seen, record=replace(seen.record, serving=known.record.serving))


def since_their_start(records: Sequence[PeerRecord]) -> Served:
    """Return the totals since each peer's start, for a single look."""
    totals = sum(map(totals_of, records), NONE)
    return Served(totals, totals)


def serving_view(records: Sequence[PeerRecord], served: Served) -> ServingView:
    """Return the view of the swarm's serving, from the records of all peers."""
    reports = [record.serving for record in records if record.serving is not None]
    recent = served.recent
    is_known = bool(reports) and served.seconds > 0
    return ServingView(
        peers=len(reports),
        sessions=sum(report.sessions for report in reports),
        tokens_per_second=recent.generated_tokens / served.seconds if is_known else None,
        prompt_tokens_per_second=recent.prompt_tokens / served.seconds if is_known else None,
        first_token=percentiles(recent.first_token),
        token=percentiles(recent.token),
        totals=served.totals,
        bounds=BOUNDS,
    )


def percentiles(latencies: Latencies) -> Percentiles:
    return Percentiles(latencies.quantile(0.5), latencies.quantile(0.95), latencies.quantile(0.99))
