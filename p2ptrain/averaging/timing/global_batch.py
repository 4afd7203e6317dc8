"""Filling the global batch of a round (``every = 1``): who has how much, and who should begin another local batch.

A round's batch is full when the samples that all peers have reported reach the target. Peers compute in whole local
batches, so if each went on until it is told to stop, everybody would have a batch too many in hand: three peers that
need one each would make five. So the leader, which every peer tells of each batch, foresees when the batches in
progress will be done: a peer that could only add to a batch which is full by then waits for the others instead. One
that is overdue is foreseen to need as long again as it is late, so that nobody waits for a slow or dead peer for long.

Batches in progress take now more, now less time than the last ones. A peer that waits in vain loses a moment; a batch
too many makes the step more expensive for all. So a peer begins one only if the others are foreseen to need `PATIENCE`
times as long.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass, replace

MAX_REPORTS = 4096
LONGEST_BATCH_SECONDS = 86400.0
PATIENCE = 2.0
HOLD_SECONDS = 8.0
"""Those that hold samples say so every few seconds."""


@dataclass(frozen=True)
class Goal:
    """With what a round is due.

    Attributes:
        samples: Of all peers together, the global batch (``every = 1``); 0 without one.
        steps: Local steps that trainers do on average (``every = H``, see `p2ptrain.averaging.timing.local_steps`); 0
            without.
    """

    samples: int = 0
    steps: int = 0


NO_GOAL = Goal()


@dataclass(frozen=True)
class Report:
    """How far a peer is in a round.

    Attributes:
        samples: Samples that it has for this round.
        batch_samples: Of which in its last local batch; 0 from who does not compute in batches of its own.
        batch_seconds: How long that took.
        reported_at: When it said so, on the leader's clock.
    """

    samples: int
    batch_samples: int
    batch_seconds: float
    reported_at: float


class GlobalBatch:
    """What the peers of one round have reported.

    Args:
        target: Samples that fill the batch; 0 without a global batch.
        pace: Seconds that each peer's local batches take, as far as it is known from other rounds; is kept current.
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
        """Those that reported."""
        return self._reports.keys()

    @property
    def missing(self) -> int:
        """Samples that are still needed; at most 0 when it is full."""
        return self.target - sum(report.samples for report in self._reports.values())

    @property
    def is_full(self) -> bool:
        """Whether the samples reported by all peers fill the batch."""
        return self.target > 0 and self.missing <= 0

    def report(self, peer: str, report: Report) -> None:
        """Take in what a peer says; a later report replaces an earlier one."""
        if peer in self._reports or len(self._reports) < MAX_REPORTS:
            self._reports[peer] = report
            if report.batch_samples:
                self._began = min(self._began, report.reported_at - report.batch_seconds)
            if report.batch_seconds and (peer in self._pace or len(self._pace) < MAX_REPORTS):
                self._pace[peer] = report.batch_seconds

    def hand_in(self, peer: str, samples: int) -> None:
        """Note that a peer handed in what it has, and computes nothing more for this round."""
        before = self._reports.get(peer, Report(0, 0, 0.0, 0.0))
        self.report(peer, replace(before, samples=samples))
        self._idle.add(peer)

    def grant(self, peer: str, held: int, wanted: int, now: float) -> int:
        """Of the samples that a peer is asked to take on, how many there is room for in this round.

        What a peer holds that says nothing any more is given to others: it may have died with it.

        Args:
            peer: Which.
            held: Samples that it has taken on for this round before, done or not.
            wanted: Samples that others would like it to take on.
            now: The leader's time.
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
        """Whether a peer that reported should compute another local batch; notes what it is going to do.

        Args:
            peer: Which one.
            expected: The peers that are presumed to compute for this round.
            now: The leader's time.
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
        """Samples that a peer which computes now will have added by then."""
        report = self._reports.get(peer)
        if report is None:  # It began with the first of the others, who may have reported often since then.
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
