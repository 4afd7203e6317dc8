"""What a swarm serves: totals of its peers, differenced over time, into rates and percentiles.

Peers send totals since they started (`p2ptrain.network.records.serving`). Adding up those of whoever is there would
fall when somebody leaves; so what each total grew by from one record to the next is added up instead. A peer that
starts again begins at 0, which is a new count and no loss. A peer that was not there at the last look is believed from
then on only: what it served before may have been counted already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from p2ptrain.network.records.record import PeerRecord
from p2ptrain.network.records.serving import BOUNDS, Latencies, ServingTotals
from p2ptrain.network.records.sighting import Sighting
from p2ptrain.status.views import Percentiles, ServingView

WINDOW_SECONDS = 60.0
"""Over which rates and percentiles of the present are taken."""
MAX_TOKENS_PER_SECOND = 1e6
MAX_PROMPT_TOKENS_PER_SECOND = 1e7
MAX_REQUESTS_PER_SECOND = 1e5
"""Of one peer; who says more is not counted."""
SLACK_SECONDS = 5.0
"""By which two records may be further apart than they say."""
NONE = ServingTotals()


class Amount(NamedTuple):
    """A total within a number of seconds; totals and seconds add up, so that rates average correctly."""

    total: float
    seconds: float


@dataclass(frozen=True)
class Told:
    """One peer's report.

    Attributes:
        started_at: Wall-clock second at which it started, from which its totals count.
        at: Wall-clock second at which it published this.
    """

    started_at: float
    at: float
    totals: ServingTotals


@dataclass(frozen=True)
class Served:
    """The totals of a swarm, as far as they are known.

    Attributes:
        totals: Since the monitor began to watch.
        recent: Of that, in the last ``seconds``; 0 before the second look.
    """

    totals: ServingTotals = NONE
    recent: ServingTotals = NONE
    seconds: float = 0.0


NOTHING = Served()


def told(seen: Sighting, known: Told | None = None) -> Told:
    """Return a peer's report; where its record has none, ``known`` stays."""
    record = seen.record
    if record.serving is not None:
        return Told(record.started_at, seen.at, record.serving.totals)
    is_same_life = known is not None and known.started_at == record.started_at
    return Told(record.started_at, seen.at, known.totals if known is not None and is_same_life else NONE)


def growth(before: Told, after: Told) -> ServingTotals | None:
    """Return the difference between two reports of a peer; None where it is not credible."""
    grown = after.totals if after.started_at != before.started_at else after.totals.since(before.totals)
    seconds = max(0.0, after.at - before.at) + SLACK_SECONDS
    if (
        grown is None
        or grown.generated_tokens > MAX_TOKENS_PER_SECOND * seconds
        or grown.prompt_tokens > MAX_PROMPT_TOKENS_PER_SECOND * seconds
        or grown.requests > MAX_REQUESTS_PER_SECOND * seconds
    ):
        return None
    return grown


class ServingBook:
    """Adds up what peers served, from look to look.

    Attributes:
        rejected: How often a peer's totals were not counted, for what they say.
    """

    def __init__(self) -> None:
        self.rejected = 0
        self._told: dict[str, Told] = {}
        self._past: deque[tuple[float, ServingTotals]] = deque()
        self._totals = NONE
        self._point: tuple[float, ServingTotals] | None = None

    def learn(self, sightings: Sequence[Sighting], now: float) -> None:
        """Take in all records of a look at second ``now``."""
        present: dict[str, Told] = {}
        for seen in sightings:
            record = seen.record
            known = self._told.get(record.peer)
            if known is not None and known.at >= seen.at:
                present[record.peer] = known
                continue
            new = told(seen, known)
            grown = growth(known, new) if known is not None else NONE
            if known is not None and grown is None:
                self.rejected += 1
                if known.started_at == new.started_at and new.totals.since(known.totals) is None:
                    new = replace(new, totals=known.totals)  # Nobody gains by counting down and up again.
            elif grown is not None and grown != NONE:
                self._totals += grown
            present[record.peer] = new
        self._told = present
        self._past.append((now, self._totals))
        while len(self._past) > 2 and self._past[1][0] <= now - WINDOW_SECONDS:
            self._past.popleft()

    def served(self) -> Served:
        """Return the totals as of the last look."""
        if not self._past:
            return NOTHING
        (first, before), (last, after) = self._past[0], self._past[-1]
        return Served(after, after.since(before) or NONE, last - first)

    def take_point(self, now: float, sessions: int | None) -> tuple[dict[str, float | Amount], dict[str, Latencies]]:
        """Return values for the history since the last call: by series, and by kind of latency.

        Args:
            now: Wall-clock second.
            sessions: That are open; None where no peer serves.
        """
        before, self._point = self._point, (now, self._totals)
        if before is None or now <= before[0]:
            return {}, {}
        grown = self._totals.since(before[1]) or NONE
        if sessions is None and grown == NONE:
            return {}, {}
        values: dict[str, float | Amount] = {
            "served_tokens_per_second": Amount(grown.generated_tokens, now - before[0]),
            "served_prompt_tokens_per_second": Amount(grown.prompt_tokens, now - before[0]),
            "served_requests": float(grown.requests),
            "served_failures": float(grown.failed_requests),
        }
        if sessions is not None:
            values["sessions"] = float(sessions)
        latencies = {"first_token_seconds": grown.first_token, "token_seconds": grown.token}
        return values, {name: each for name, each in latencies.items() if each.total}


def since_their_start(records: Sequence[PeerRecord]) -> Served:
    """Return the totals since each peer's start, where there is only one look."""
    totals = sum((record.serving.totals for record in records if record.serving is not None), NONE)
    return Served(totals, totals)


def serving_view(records: Sequence[PeerRecord], served: Served) -> ServingView:
    """Return the view of what the swarm serves.

    Args:
        records: Of all peers.
        served: What they served.
    """
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
