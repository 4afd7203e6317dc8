"""What a run of continuous integration did: a table of suites, and a line with the totals.

    python -m tests.support.summary FOLDER

reads from the folder, for each suite, ``NAME.step`` (``SECONDS EXITCODE``) and, if it ran pytest, ``NAME.xml`` (JUnit's
format); ``NAME.left-out`` is empty. The exit code is 1 if something failed, or if nothing passed at all.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Suite:
    """What one suite did: numbers of tests, one for a step that is no test, and why how many were skipped."""

    name: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    reasons: tuple[tuple[str, int], ...] = ()


def read_suite(step: Path) -> Suite:
    """Return what a suite did. A broken report, or a failure without a failed test, counts as one failed test."""
    seconds, code = step.read_text().split()
    report = step.with_suffix(".xml")
    if not report.exists():
        return Suite(step.stem, int(code == "0"), int(code != "0"), 0, float(seconds))
    try:
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    except ElementTree.ParseError:
        return Suite(step.stem, 0, 1, 0, float(seconds))
    total, failed, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites for name in names)
        for names in (("tests",), ("failures", "errors"), ("skipped",))
    )
    reasons = Counter(each.get("message", "") for suite in suites for each in suite.iter("skipped"))
    passed, failed = max(0, total - failed - skipped), failed or int(code != "0")
    return Suite(step.stem, passed, failed, skipped, float(seconds), tuple(sorted(reasons.items())))


def table(suites: list[Suite], left_out: list[str]) -> str:
    """Return the table, the reasons of what was skipped, and the totals in the last line."""
    lines = [f"{'suite':16} {'passed':>7} {'failed':>7} {'skipped':>8} {'seconds':>8}"]
    for suite in suites:
        lines.append(f"{suite.name:16} {suite.passed:7} {suite.failed:7} {suite.skipped:8} {suite.seconds:8.0f}")
    lines += [f"{name:16} left out" for name in left_out]
    for suite in suites:
        lines += [f"skipped in {suite.name}: {number} times: {reason}" for reason, number in suite.reasons]
    totals = (f"{sum(getattr(suite, name) for suite in suites)} {name}" for name in ("passed", "failed", "skipped"))
    return "\n".join([*lines, ", ".join(totals)])


def main(folder: Path) -> int:
    steps = sorted(folder.glob("*.step"), key=lambda path: path.stat().st_mtime)
    suites = [read_suite(step) for step in steps]
    sys.stdout.write(table(suites, sorted(path.stem for path in folder.glob("*.left-out"))) + "\n")
    return int(any(suite.failed for suite in suites) or not any(suite.passed for suite in suites))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
