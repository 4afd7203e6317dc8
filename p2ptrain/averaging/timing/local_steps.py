"""When a round of local steps closes (``every = H``): the swarm's steps reach H for each trainer.

A round's goal is shared: H steps times the number of trainers. A fast peer does more of them, a slow one fewer, and
their tokens weigh the contributions. Every trainer tells the round's leader how far it is; the leader foresees when all
together reach the goal, and tells that instant as seconds from now. Each peer steps until then, so all of them come to
the group at the same time and none waits for the slowest.

The instant is moved to the end of a step of the slowest peer, where that is near: a peer of few, long steps would
otherwise wait for the rest of the round, or the others for the rest of its step.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass, field

MOST_ROUNDS = 4.0
"""A round closes when a peer has done so many times H steps, though the swarm is not there yet: a model that trains
alone for longer drifts away from the others. At speeds of 1 : 1 : 8 the fast peer does 2.4 times H."""
SILENT_SECONDS = 30.0
"""A trainer whose last report is older, or that has not reported for so long, counts no more. Longer than two reports
of `p2ptrain.averaging.grouping.round_position.MOST_PROBE_SECONDS` each; until then the trainer counts as one that goes
on."""
LEAST_STEP_SECONDS = 1e-3
"""Shortest step that a report may claim: a rate of steps stays finite."""
ALIGNED = 1 / 3
"""By how much of its length a round is made longer or shorter to end with a step of the slowest peer."""

STEADY = 0.5
"""By how much more the round may differ once peers were told: they stop, or begin another step, relying on it."""


@dataclass(frozen=True)
class StepReport:
    """How far a trainer is in a round.

    Attributes:
        steps: Local steps that it has done for this round.
        seconds: How long one takes; 0 if it has not done any.
        age: Seconds since the step in progress began.
        heard_at: When it said so, on the leader's clock.
        is_stepping: False if it waits for the end of the round.
    """

    steps: int
    seconds: float
    age: float
    heard_at: float
    is_stepping: bool

    def paced(self, seconds: float) -> StepReport:
        """This report, with a pace from earlier rounds if it has none."""
        return self if self.seconds else StepReport(self.steps, seconds, self.age, self.heard_at, self.is_stepping)

    @property
    def step_seconds(self) -> float:
        """How long its step in progress is foreseen to take: one that is late needs as long again as it is late."""
        return max(LEAST_STEP_SECONDS, self.seconds + 2 * max(0.0, self.age - self.seconds))

    def steps_at(self, now: float) -> float:
        """Steps at a later time, in fractions."""
        if not self.is_stepping:
            return self.steps
        return self.steps + (self.age + now - self.heard_at) / self.step_seconds

    def ends_at(self, number: int) -> float:
        """When it is foreseen to have done so many steps, at least one more than now."""
        return self.heard_at - self.age + (number - self.steps) * self.step_seconds


@dataclass
class Closing:
    """Reports of one round's trainers, and when the round closes.

    Attributes:
        steps: H, the steps that trainers do on average; 0 for a round without local steps.
        began: When the round began, on the leader's clock.
        pace: By peer: seconds of a step, as far as they are known from other rounds; is kept current.
        at: When the round closes; None where that cannot be told.
    """

    steps: int = 0
    began: float = 0.0
    pace: dict[str, float] = field(default_factory=dict)
    at: float | None = None
    _reports: dict[str, StepReport] = field(default_factory=dict)
    _last_step: tuple[str, int] | None = None

    @property
    def peers(self) -> Collection[str]:
        """Peers that reported."""
        return self._reports.keys()

    def report(self, peer: str, report: StepReport, max_reports: int) -> None:
        """Take in what a peer says; a later report replaces an earlier one."""
        if peer in self._reports or len(self._reports) < max_reports:
            self._reports[peer] = report
            if report.seconds and (peer in self.pace or len(self.pace) < max_reports):
                self.pace[peer] = report.seconds

    def hand_in(self, peer: str, now: float) -> None:
        """Record that a peer handed in its contribution: it does no more steps for this round."""
        before = self._reports.get(peer, StepReport(0, 0.0, 0.0, now, False))
        self._reports[peer] = StepReport(before.steps, before.seconds, 0.0, now, False)

    def is_due(self, now: float) -> bool:
        """Whether the round should close now, by the last `foresee`."""
        return self.at is not None and now >= self.at

    def foresee(self, trainers: Collection[str], now: float) -> None:
        """Set `at` from what the trainers of this round, as the leader knows them, have reported."""
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
        unknown = len(fresh) - len(known)  # They began with the others, and report soon.
        wanted = self.steps * len(fresh) - sum(done) - unknown * statistics.median(done)
        # Those that wait do so because of what they were told: that must not put the end off.
        rate = sum(1 / report.step_seconds for report in known.values()) + unknown / usual
        most = MOST_ROUNDS * self.steps
        to_most = [max(0.0, most - report.steps_at(now)) * report.step_seconds for report in known.values()]
        return max(now, self._aligned(now + min([wanted / rate, *to_most]), known, now))

    def _aligned(self, at: float, known: dict[str, StepReport], now: float) -> float:
        """The end of a step of the slowest peer that has one near enough; as long as it stays near, of the same one."""
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
        """Expected peers that will not come in time if the round closes now, so that nobody need wait for them.

        Their step in progress lasts longer than that, or they are in the step that they began in an earlier round. What
        they do counts in the round in which they end it.

        Args:
            expected: For whom the leader would wait.
            behind: Those that were not in the last round, and are in an earlier one by their records.
            now: The leader's time.
            patience: Seconds that the others would wait.
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
