"""What an averaging benchmark found: a table a section, and ratios beside the goals that they are held to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.harness import format_table


@dataclass(frozen=True)
class Finding:
    """One ratio.

    Attributes:
        what: Was measured.
        value: The ratio, or share.
        against: What it is a ratio to.
        goal: The bound that it should keep; None without one.
        at_least: Whether ``goal`` is a lower bound.
        note: The same in other words.
    """

    what: str
    value: float
    against: str
    goal: float | None = None
    at_least: bool = False
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is; None without one."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.at_least else self.value <= self.goal

    def to_json(self) -> dict[str, Any]:
        """Plain values; one that is not finite is None, which JSON has."""
        return {**asdict(self), "value": self.value if math.isfinite(self.value) else None, "met": self.is_met}

    def row(self) -> tuple[str, str, str, str, str, str]:
        """What, ratio, against, in other words, goal, met."""
        sign = "≥" if self.at_least else "≤"
        goal = "" if self.goal is None else f"{sign} {self.goal:.3g}"
        met = {None: "", True: "met", False: "missed"}[self.is_met]
        return self.what, f"{self.value:.3f}", self.against, self.note, goal, met


def faster(what: str, ours: float, theirs: float, goal: float | None = None) -> Finding:
    """A time as a share of hivemind's; ``goal`` is how many times faster it should be."""
    note = f"{theirs / ours:.2f}x faster" + (f", goal {goal:g}x" if goal else "")
    return Finding(what, ours / theirs, "hivemind", 1 / goal if goal else None, note=note)


@dataclass
class Section:
    """One part of the comparison.

    Attributes:
        title: What was measured, and how.
        headers: Of its table.
        rows: Of its table.
        findings: Its ratios.
        results: All values, for JSON.
        notes: What a reader must know to judge it.
        failures: By what could not be measured: why.
    """

    title: str
    headers: Sequence[str]
    rows: list[Sequence[object]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """The table, for a screen."""
        failures = [f"{what} failed: {why}" for what, why in self.failures.items()]
        notes = "".join(f"\n{note}" for note in (*self.notes, *failures))
        table = f"\n\n{format_table(self.headers, self.rows)}" if self.rows else ""
        return f"{self.title}{table}\n{notes}"

    def to_json(self) -> dict[str, Any]:
        """Everything but the table."""
        found = [finding.to_json() for finding in self.findings]
        return {"title": self.title, "notes": self.notes, "findings": found, "results": self.results}


def goal_table(findings: Sequence[Finding]) -> str:
    """All ratios, with the goals beside them."""
    return format_table(("ratio", "measured", "of", "", "goal", ""), [finding.row() for finding in findings])
