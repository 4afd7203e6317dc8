"""Closing time of a round of local steps (``every = H``): the trainers' steps reach H per trainer.

A fast peer does more steps than a slow one, and contributions are weighted by their tokens. The leader predicts from
the trainers' reports when they reach H together, and announces this time as seconds from now. All peers step until
then, and do not wait for the slowest. If a step of the slowest peer ends near this time, the round closes with it:
otherwise a peer with few, long steps would wait for the rest of the round, or the others for the rest of its step.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass, field

MOST_ROUNDS = 4.0
"""Upper bound on a peer's steps in units of H, after which the round closes: a model that trains alone for longer
drifts. At speeds of 1 : 1 : 8 the fast peer does 2.4 H."""
SILENT_SECONDS = 30.0
"""Report timeout, after which a trainer no longer counts; > 2 report intervals of at most
`p2ptrain.averaging.grouping.round_position.MOST_PROBE_SECONDS`."""
LEAST_STEP_SECONDS = 1e-3  # lower bound on the step of a report: rates stay finite
ALIGNED = 1 / 3  # maximum shift of the closing time to the end of a step, as a fraction of the round

STEADY = 0.5  # additional tolerance, relative to the first, once peers rely on an announced time


@dataclass(frozen=True)
class StepReport:
    """A trainer's progress in a round.

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

    def paced(self, seconds: float) -> StepReport:
        """Return this report, with a pace from earlier rounds if it has none."""
        return self if self.seconds else StepReport(self.steps, seconds, self.age, self.heard_at, self.is_stepping)

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
class Closing:
    """Reports of one round's trainers, and the predicted closing time.

    Attributes:
        steps: H, the average steps of a trainer; 0 for a round without local steps.
        began: Start of the round, on the leader's clock.
        pace: By peer: seconds of a step, known from other rounds; updated here.
        at: Closing time of the round; None if unknown.
    """

    steps: int = 0
    began: float = 0.0
    pace: dict[str, float] = field(default_factory=dict)
    at: float | None = None
    _reports: dict[str, StepReport] = field(default_factory=dict)
    _last_step: tuple[str, int] | None = None

    @property
    def peers(self) -> Collection[str]:
        return self._reports.keys()

    def report(self, peer: str, report: StepReport, max_reports: int) -> None:
        """Record a peer's report; it replaces an earlier one."""
        if peer in self._reports or len(self._reports) < max_reports:
            self._reports[peer] = report
            if report.seconds and (peer in self.pace or len(self.pace) < max_reports):
                self.pace[peer] = report.seconds

    def hand_in(self, peer: str, now: float) -> None:
        """Record that a peer handed in its contribution, and does no more steps for this round."""
        before = self._reports.get(peer, StepReport(0, 0.0, 0.0, now, False))
        self._reports[peer] = StepReport(before.steps, before.seconds, 0.0, now, False)

    def is_due(self, now: float) -> bool:
        """True if the round should close now, by the last `foresee`."""
        return self.at is not None and now >= self.at

    def foresee(self, trainers: Collection[str], now: float) -> None:
        """Set `at` from the reports of this round's trainers."""
        self.at = self._foreseen(trainers, now) if self.steps and len(trainers) > 1 else None

    def _foreseen(self, trainers: Collection[str], now: float) -> float | None:
        fresh = [peer for peer in trainers if now - self._heard_at(peer) < SILENT_SECONDS]
        seconds = [self.pace[peer] for peer in fresh if peer in self.pace]
        if not seconds:
            return None
        usual = statistics.median(seconds)
        known = {peer: self._reports[peer].paced(self.pace.get(peer, usual)) for peer in fresh if peer in self._reports}
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

    def _aligned(self, at: float, known: dict[str, StepReport], now: float) -> float:
        """Return the end of a step of the slowest peer near ``at``; keep the last choice while it stays near."""
        tolerance = ALIGNED * (at - self.began)
        if self._last_step is not None and self.at is not None:
            peer, number = self._last_step
            report = known.get(peer)
            is_on_its_way = report is not None and report.is_stepping and report.steps < number
            end = report.ends_at(number) if report is not None and is_on_its_way else self.at
            if abs(end - at) <= (1 + STEADY) * tolerance:
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

    def absentees(self, expected: Collection[str], behind: Collection[str], now: float, patience: float) -> set[str]:
        """Return the expected peers that will miss the group if the round closes now; they are not waited for.

        Their step in progress takes longer than ``patience`` seconds, or began in an earlier round: it counts in the
        round in which it ends. Peers ``behind`` missed the last round, and are in an earlier one by their records.
        """

        def is_absent(peer: str) -> bool:
            report = self._reports.get(peer)
            if report is None:
                return peer in behind and now - self.began > patience
            report = report.paced(self.pace.get(peer, 0.0))
            return report.is_stepping and report.seconds > 0 and report.ends_at(report.steps + 1) > now + patience

        return {peer for peer in expected if is_absent(peer)} if self.steps else set()

    def _heard_at(self, peer: str) -> float:
        report = self._reports.get(peer)
        return self.began if report is None else report.heard_at
