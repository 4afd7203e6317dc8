"""The global batch of a round (``every = 1``): its progress, and which peers start another local batch.

The batch is full when the samples of all peers reach the target. Peers compute whole local batches, and would end with
one too many each if they continued until they are told to stop. The leader therefore predicts from their reports when
the batches in progress end. A peer starts another batch only if the others are predicted to need `PATIENCE` times as
long: a surplus batch makes the step more expensive for all peers, and a needless wait costs a moment. An overdue peer
is predicted to need as long again as it is late, so that a slow or dead peer does not delay the others long.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass, replace

MAX_REPORTS = 4096
LONGEST_BATCH_SECONDS = 86400.0
PATIENCE = 2.0
HOLD_SECONDS = 8.0  # timeout of held samples; holders report every few seconds


@dataclass(frozen=True)
class Goal:
    """The condition on which a round is due.

    Attributes:
        samples: Global batch of all peers (``every = 1``); 0 without one.
        steps: Average local steps of a trainer (``every = H``, see `p2ptrain.averaging.timing.local_steps`); 0 without.
    """

    samples: int = 0
    steps: int = 0


NO_GOAL = Goal()


@dataclass(frozen=True)
class Report:
    """A peer's progress in a round.

    Attributes:
        batch_samples: Samples of its last local batch; 0 for a peer without batches of its own.
        batch_seconds: Duration of that batch.
        reported_at: Time of the report, on the leader's clock.
    """

    samples: int
    batch_samples: int
    batch_seconds: float
    reported_at: float


class GlobalBatch:
    """Reports of the peers of one round; ``target`` is 0 without a global batch.

    ``pace`` has the seconds of a local batch by peer, known from other rounds, and is updated here.
    """

    def __init__(self, target: int, pace: dict[str, float] | None = None) -> None:
        self.target = target
        self._pace: dict[str, float] = {} if pace is None else pace
        self._reports: dict[str, Report] = {}
        self._idle: set[str] = set()
        self._held: dict[str, tuple[int, float]] = {}
        self._began = math.inf

    @property
    def peers(self) -> Collection[str]:
        return self._reports.keys()

    @property
    def missing(self) -> int:
        """Samples that are still needed; at most 0 when the batch is full."""
        return self.target - sum(report.samples for report in self._reports.values())

    @property
    def is_full(self) -> bool:
        return self.target > 0 and self.missing <= 0

    def report(self, peer: str, report: Report) -> None:
        """Record a peer's report; it replaces an earlier one."""
        if peer in self._reports or len(self._reports) < MAX_REPORTS:
            self._reports[peer] = report
            if report.batch_samples:
                self._began = min(self._began, report.reported_at - report.batch_seconds)
            if report.batch_seconds and (peer in self._pace or len(self._pace) < MAX_REPORTS):
                self._pace[peer] = report.batch_seconds

    def hand_in(self, peer: str, samples: int) -> None:
        """Record that a peer handed in its samples, and computes no more for this round."""
        before = self._reports.get(peer, Report(0, 0, 0.0, 0.0))
        self.report(peer, replace(before, samples=samples))
        self._idle.add(peer)

    def grant(self, peer: str, held: int, wanted: int, now: float) -> int:
        """Return how many of the ``wanted`` samples a peer may take on, besides those ``held`` for this round, done or
        not.

        Samples of a peer that stopped reporting are granted to others: it may have died with them. ``now`` is the
        leader's time.
        """
        self._held.pop(peer, None)
        others = {*self._held, *self._reports}.difference([peer])
        taken = sum(max(self._holds(other, now), self._samples_of(other)) for other in others)
        if len(self._held) >= MAX_REPORTS:
            return 0
        granted = min(wanted, max(0, self.target - taken - held))
        self._held[peer] = held + granted, now
        return granted

    def _holds(self, peer: str, now: float) -> int:
        held, said_at = self._held.get(peer, (0, now))
        return held if now - said_at < HOLD_SECONDS else 0

    def _samples_of(self, peer: str) -> int:
        report = self._reports.get(peer)
        return report.samples if report is not None else 0

    def should_begin(self, peer: str, expected: Collection[str], now: float) -> bool:
        """True if a peer that reported should start another local batch; records the decision.

        ``expected`` peers are presumed to compute for this round; ``now`` is the leader's time.
        """
        own = self._reports.get(peer)
        if own is None or not self.target or not own.batch_samples:
            return True
        done_at = now + PATIENCE * own.batch_seconds
        others = {*self._reports, *expected}.difference(self._idle, [peer])
        if sum(self._foresee(other, done_at, now) for other in others) >= self.missing:
            self._idle.add(peer)
            return False
        self._idle.discard(peer)
        return True

    def _foresee(self, peer: str, until: float, now: float) -> int:
        """Return the samples that a computing peer is predicted to add by ``until``."""
        report = self._reports.get(peer)
        if report is None:  # Assume that it began with the first of the others.
            others = [one for one in self._reports.values() if one.batch_samples]
            began = self._began
            samples = min(one.batch_samples for one in others)
            seconds = self._pace.get(peer, statistics.median(one.batch_seconds for one in others))
        else:
            began, samples, seconds = report.reported_at, report.batch_samples, report.batch_seconds
        first_at = now + abs(began + seconds - now)
        if first_at > until:
            return 0
        return samples * (1 + int((until - first_at) / max(seconds, 1e-3)))
