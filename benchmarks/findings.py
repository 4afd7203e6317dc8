"""What a benchmark found: a table a section, and ratios beside the goals that they are held to."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import exit_on_signals, format_table, machine


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

    @classmethod
    def from_json(cls, values: Mapping[str, Any], benchmark: str) -> Finding:
        """What `to_json` of a benchmark gave, with its name before what was measured."""
        value = values["value"] if values["value"] is not None else math.inf
        known = {name: values[name] for name in ("against", "goal", "at_least", "note")}
        return cls(f"{benchmark}: {values['what']}", value, **known)

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
    headers: Sequence[str] = ()
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


def run(
    name: str,
    parts: Mapping[str, Callable[[], Section | None]],
    options: argparse.Namespace,
    draw: Callable[[Sequence[Finding]], None] | None = None,
) -> int:
    """Measure all parts, print them and the goals, and write ``options.json``; 1 when a part failed, else 0.

    Args:
        name: Of the benchmark.
        parts: By name; one that cannot be measured on this machine returns None.
        options: The command line; see `benchmarks.harness.arguments`.
        draw: Draws the ratios, if there are any.
    """
    exit_on_signals()  # so that the parts end what they started
    found: dict[str, Section] = {}
    failed: dict[str, str] = {}
    for part, measure in parts.items():
        started = time.monotonic()
        try:
            section = measure()
        except RuntimeError as error:
            failed[part] = str(error)
            sys.stdout.write(f"{part} failed: {error}\n\n")
            continue
        if section is not None:
            found[part] = section
            failed |= {f"{part} {what}": why for what, why in section.failures.items()}
            sys.stdout.write(f"{section}\n")
        sys.stdout.write(f"({part} took {time.monotonic() - started:.0f} s)\n\n")
        sys.stdout.flush()
    findings = [finding for section in found.values() for finding in section.findings]
    if findings:
        sys.stdout.write(f"{goal_table(findings)}\n")
    if options.json:
        results = {part: section.to_json() for part, section in found.items()}
        payload = {"benchmark": name, "machine": machine(), "results": results, "failed": failed}
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(payload, indent=2) + "\n", encoding="utf-8")
        sys.stdout.write(f"\nwritten to {options.json}\n")
    if draw is not None and findings:
        draw(findings)
    return 1 if failed else 0
