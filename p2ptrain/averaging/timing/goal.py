"""The goal of a round and the peers' progress towards it, from which its leader predicts the end of the round.

**A global batch** (``every = 1``, `GlobalBatch`) is full when the samples of all peers reach the target. Peers compute
whole local batches. A peer starts another one only if the others are predicted to need `WAIT_BATCHES` times as long: a
surplus batch costs all peers more than a short wait. An overdue peer is predicted to need as long again as it is late.

**Local steps** (``every = H``, `LocalSteps`): the round closes when the trainers reach H steps each on average. The
leader announces the predicted time, and all peers step until then. If a step of the slowest peer ends near this time,
the round closes with it. In a private swarm each trainer takes H steps, and then waits for the others: a fast machine
would otherwise pull the model towards its own data. Once a quorum is there, the leader asks the rest to hand in.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection
from dataclasses import dataclass, field, replace

MAX_REPORTS = 4096
LONGEST_BATCH_SECONDS = 86400.0
WAIT_BATCHES = 2.0
HOLD_SECONDS = 8.0  # timeout of held samples; holders report every few seconds
NO_PROGRESS_SECONDS = 120.0
"""Timeout of held samples of a peer that reports, and gets none done, and of a leader that grants none: either would
stop its stage for ever. > the duration of a microbatch."""


@dataclass(frozen=True)
class Goal:
    """The condition on which a round is due.

    Attributes:
        samples: Global batch of all peers (``every = 1``); 0 without one.
        steps: Local steps of a trainer (``every = H``); 0 without.
        each: True if each trainer takes that many, False if they do on average.
    """

    samples: int = 0
    steps: int = 0
    each: bool = False

    @property
    def mean_steps(self) -> int:
        """Average local steps of a trainer, for `LocalSteps`; 0 if there is no such goal."""
        return 0 if self.each else self.steps


NO_GOAL = Goal()


@dataclass(frozen=True)
class BatchProgress:
    """A peer's progress towards the global batch.

    Attributes:
        batch_samples: Samples of its last local batch; 0 for a peer without batches of its own.
        batch_seconds: Duration of that batch.
        reported_at: Time of the report, on the leader's clock.
    """

    samples: int
    batch_samples: int
    batch_seconds: float
    reported_at: float


@dataclass(frozen=True)
class _Hold:
    """A peer's held samples, by its last report.

    Attributes:
        said_at: Time of the report.
        done: Samples that it had done.
        since: Time since which it has done no more.
    """

    samples: int
    said_at: float
    done: int
    since: float


class GlobalBatch:
    """The last reports of the peers of one round; ``target`` is 0 without a global batch.

    ``pace`` has the seconds of a local batch by peer, known from other rounds, and is updated here.
    """

    def __init__(self, target: int, pace: dict[str, float] | None = None) -> None:
        self.target = target
        self.reports: dict[str, BatchProgress] = {}
        self._pace: dict[str, float] = {} if pace is None else pace
        self._idle: set[str] = set()
        self._held: dict[str, _Hold] = {}
        self._began = math.inf

    @property
    def missing(self) -> int:
        """Samples that are still needed; at most 0 when the batch is full."""
        return self.target - sum(report.samples for report in self.reports.values())

    @property
    def is_full(self) -> bool:
        return self.target > 0 and self.missing <= 0

    def report(self, peer: str, report: BatchProgress) -> None:
        if peer in self.reports or len(self.reports) < MAX_REPORTS:
            self.reports[peer] = report
            if report.batch_samples:
                self._began = min(self._began, report.reported_at - report.batch_seconds)
            if report.batch_seconds and (peer in self._pace or len(self._pace) < MAX_REPORTS):
                self._pace[peer] = report.batch_seconds

    def hand_in(self, peer: str, samples: int) -> None:
        """Record that a peer handed in its samples, and computes no more for this round."""
        before = self.reports.get(peer, BatchProgress(0, 0, 0.0, 0.0))
        self.report(peer, replace(before, samples=samples))
        self._idle.add(peer)

    def grant(self, peer: str, held: int, wanted: int, now: float) -> int:
        """Return how many of the ``wanted`` samples a peer may take on, besides those ``held`` for this round, done or
        not.

        Samples of a peer that stopped reporting are granted to others: it may have died with them. So are those of one
        that gets none done. ``now`` is the leader's time.
        """
        before, done = self._held.pop(peer, None), self.reports[peer].samples if peer in self.reports else 0
        if len(self._held) >= MAX_REPORTS:
            return 0
        taken = {other: report.samples for other, report in self.reports.items() if other != peer}
        for other, hold in self._held.items():
            if now - hold.said_at < HOLD_SECONDS and now - hold.since < NO_PROGRESS_SECONDS:
                taken[other] = max(hold.samples, taken.get(other, 0))
        granted = min(wanted, max(0, self.target - sum(taken.values()) - held))
        since = before.since if before is not None and before.done == done else now
        self._held[peer] = _Hold(held + granted, now, done, since)
        return granted

    def should_begin(self, peer: str, expected: Collection[str], now: float) -> bool:
        """True if a peer that reported should start another local batch; records the decision.

        ``expected`` peers are presumed to compute for this round; ``now`` is the leader's time.
        """
        own = self.reports.get(peer)
        if own is None or not self.target or not own.batch_samples:
            return True
        done_at = now + WAIT_BATCHES * own.batch_seconds
        others = {*self.reports, *expected}.difference(self._idle, [peer])
        if sum(self._foresee(other, done_at, now) for other in others) >= self.missing:
            self._idle.add(peer)
            return False
        self._idle.discard(peer)
        return True

    def _foresee(self, peer: str, until: float, now: float) -> int:
        """Return the samples that a computing peer is predicted to add by ``until``."""
        report = self.reports.get(peer)
        if report is None:  # Assume that it began with the first of the others.
            others = [one for one in self.reports.values() if one.batch_samples]
            began = self._began
            samples = min(one.batch_samples for one in others)
            seconds = self._pace.get(peer, statistics.median(one.batch_seconds for one in others))
        else:
            began, samples, seconds = report.reported_at, report.batch_samples, report.batch_seconds
        first_at = now + abs(began + seconds - now)
        if first_at > until:
            return 0
        return samples * (1 + int((until - first_at) / max(seconds, 1e-3)))


MOST_ROUNDS = 4.0
"""Upper bound on a peer's steps in units of H, after which the round closes: a model that trains alone for longer
drifts. At speeds of 1 : 1 : 8 the fast peer does 2.4 H."""
SILENT_SECONDS = 30.0
"""Report timeout, after which a trainer no longer counts; > 2 report intervals of at most
`p2ptrain.averaging.grouping.leaders.MOST_PROBE_SECONDS`."""
LEAST_STEP_SECONDS = 1e-3  # lower bound on the step of a report: rates stay finite
ALIGNED = 1 / 3  # maximum shift of the closing time to the end of a step, as a fraction of the round
STEADY = 0.5  # additional tolerance, relative to the first, once peers rely on an announced time


@dataclass(frozen=True)
class StepProgress:
    """A trainer's local steps in a round.

    Attributes:
        seconds: Duration of a step; 0 before the first.
        age: Seconds since the step in progress began.
        heard_at: Time of the report, on the leader's clock.
        is_stepping: False if it waits for the end of the round.
    """

    steps: int
    seconds: float
    age: float
    heard_at: float
    is_stepping: bool

    def paced(self, seconds: float) -> StepProgress:
        """Return this report, with a pace from earlier rounds if it has none."""
        return self if self.seconds else replace(self, seconds=seconds)

    @property
    def step_seconds(self) -> float:
        """Predicted duration of the step in progress: a late one needs as long again as it is late."""
        return max(LEAST_STEP_SECONDS, self.seconds + 2 * max(0.0, self.age - self.seconds))

    def steps_at(self, now: float) -> float:
        """Return the steps, in fractions, at a later time."""
        if not self.is_stepping:
            return self.steps
        return self.steps + (self.age + now - self.heard_at) / self.step_seconds

    def ends_at(self, number: int) -> float:
        """Return the predicted end of step ``number``, which must be later than `steps`."""
        return self.heard_at - self.age + (number - self.steps) * self.step_seconds


@dataclass
class LocalSteps:
    """Reports of one round's trainers, and the predicted closing time.

    Attributes:
        steps: H, the average steps of a trainer; 0 for a round without local steps.
        began: Start of the round, on the leader's clock.
        pace: By peer: seconds of a step, known from other rounds; updated here.
        at: Closing time of the round; None if unknown.
        reports: The last one by peer.
    """

    steps: int = 0
    began: float = 0.0
    pace: dict[str, float] = field(default_factory=dict)
    at: float | None = None
    reports: dict[str, StepProgress] = field(default_factory=dict)
    _last_step: tuple[str, int] | None = None

    def report(self, peer: str, report: StepProgress) -> None:
        if peer in self.reports or len(self.reports) < MAX_REPORTS:
            self.reports[peer] = report
            if report.seconds and (peer in self.pace or len(self.pace) < MAX_REPORTS):
                self.pace[peer] = report.seconds

    def hand_in(self, peer: str, now: float) -> None:
        """Record that a peer handed in its contribution, and does no more steps for this round."""
        before = self.reports.get(peer, StepProgress(0, 0.0, 0.0, now, False))
        self.reports[peer] = replace(before, age=0.0, heard_at=now, is_stepping=False)

    def is_due(self, now: float) -> bool:
        """True if the round should close now, by the last `foresee`."""
        return self.at is not None and now >= self.at

    def foresee(self, trainers: Collection[str], now: float) -> None:
        """Set `at` from the reports of this round's trainers."""
        self.at = self._foreseen(trainers, now) if self.steps and len(trainers) > 1 else None

    def _foreseen(self, trainers: Collection[str], now: float) -> float | None:
        heard_at = {peer: report.heard_at for peer, report in self.reports.items()}
        fresh = [peer for peer in trainers if now - heard_at.get(peer, self.began) < SILENT_SECONDS]
        seconds = [self.pace[peer] for peer in fresh if peer in self.pace]
        if not seconds:
            return None
        usual = statistics.median(seconds)
        known = {peer: self.reports[peer].paced(self.pace.get(peer, usual)) for peer in fresh if peer in self.reports}
        if not known:
            return None
        done = [report.steps_at(now) for report in known.values()]
        unknown = len(fresh) - len(known)  # Assume that they began with the others.
        wanted = self.steps * len(fresh) - sum(done) - unknown * statistics.median(done)
        # Waiting peers count at their full rate: they wait because of `at`, and must not delay it.
        rate = sum(1 / report.step_seconds for report in known.values()) + unknown / usual
        most = MOST_ROUNDS * self.steps
        to_most = [max(0.0, most - report.steps_at(now)) * report.step_seconds for report in known.values()]
        return max(now, self._aligned(now + min([wanted / rate, *to_most]), known, now))

    def _aligned(self, at: float, known: dict[str, StepProgress], now: float) -> float:
        """Return the end of a step of the slowest peer near ``at``.

        From the start of that step on, the choice stays while it is near: peers plan their own last steps by it.
        Before, no peer does, and the leader may not yet have heard from all trainers.
        """
        tolerance = ALIGNED * (at - self.began)
        if self._last_step is not None and self.at is not None:
            peer, number = self._last_step
            report, end = known.get(peer), self.at
            has_begun = report is None or report.steps_at(now) >= number - 1
            if report is not None and report.is_stepping and report.steps < number:
                end = report.ends_at(number)
            if has_begun and abs(end - at) <= (1 + STEADY) * tolerance:
                return end
        self._last_step = None
        stepping = [peer for peer, report in known.items() if report.is_stepping]
        for peer in sorted(stepping, key=lambda peer: -known[peer].step_seconds):
            report = known[peer]
            number = max(report.steps + 1, round(report.steps_at(at)))
            end = report.ends_at(number)
            if end >= now and abs(end - at) <= tolerance:
                self._last_step = peer, number
                return end
        return at

    def absentees(self, expected: Collection[str], behind: Collection[str], now: float, seconds: float) -> set[str]:
        """Return the expected peers that will miss the group if the round closes now; they are not waited for.

        Their step in progress takes longer than ``seconds``, or began in an earlier round: it counts in the
        round in which it ends. Peers ``behind`` missed the last round, and are in an earlier one by their records.
        """

        def is_absent(peer: str) -> bool:
            report = self.reports.get(peer)
            if report is None:
                return peer in behind and now - self.began > seconds
            report = report.paced(self.pace.get(peer, 0.0))
            return report.is_stepping and report.seconds > 0 and report.ends_at(report.steps + 1) > now + seconds

        return {peer for peer in expected if is_absent(peer)} if self.steps else set()
