"""Ratios beside their goals, and what a benchmark makes of its measurements."""

import argparse
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.__main__ import BENCHMARKS
from benchmarks.bench_averaging import size
from benchmarks.findings import Finding, Section, faster, run
from benchmarks.harness import Measured
from benchmarks.plot import PlotError, plot
from tests.support.tools import unavailable, why_no_pictures


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_quantiles_are_those_of_numpy(values: list[float], share: float) -> None:
    expected = float(np.quantile(values, share))
    assert Measured(tuple(values)).quantile(share) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("finding", "is_met"),
    [
        (Finding("x", 0.4, "hivemind", 0.5), True),
        (Finding("x", 0.6, "hivemind", 0.5), False),
        (Finding("x", 0.6, "hivemind", 0.5, at_least=True), True),
        (Finding("x", 1.0, "hivemind"), None),
        (faster("round", ours=1.0, theirs=2.0, goal=2.0), True),
        (faster("round", ours=1.0, theirs=2.0, goal=3.0), False),
    ],
)
def test_a_goal_is_an_upper_bound_unless_it_says_otherwise(finding: Finding, is_met: bool | None) -> None:
    assert finding.is_met is is_met


def test_what_never_ended_is_missed_and_still_json() -> None:
    never = Finding("x", math.inf, "normal + grace", 1.2)
    assert json.loads(json.dumps(never.to_json(), allow_nan=False))["met"] is False


def test_a_part_that_fails_is_told_and_the_others_are_written_for_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.findings.exit_on_signals", lambda: None)
    found = Finding("x", 2.0, "hivemind", 1.0, note="note")

    def fail() -> Section:
        raise RuntimeError("a peer is gone")

    parts = {"good": lambda: Section("title", findings=[found]), "bad": fail, "not here": lambda: None}
    assert run("name", parts, argparse.Namespace(json=str(tmp_path / "new" / "found.json"))) == 1
    written = json.loads((tmp_path / "new" / "found.json").read_text())
    assert written["failed"] == {"bad": "a peer is gone"}
    (again,) = [Finding.from_json(one, "name") for one in written["results"]["good"]["findings"]]
    assert again == Finding("name: x", 2.0, "hivemind", 1.0, note="note")


def test_sizes_are_peers_and_millions_of_values() -> None:
    assert [size("2x10M"), size("4x0.5M")] == [(2, 10_000_000), (4, 500_000)]
    for text in ("", "2x10", "1x10M", "ax1M", "2x-1M"):
        with pytest.raises(argparse.ArgumentTypeError, match="no size"):
            size(text)


def test_nothing_to_draw_is_said() -> None:
    unavailable(why_no_pictures(), "matplotlib")
    with pytest.raises(PlotError, match="no ratio"):
        plot([Finding("stopped", math.inf, "normal + grace", 1.2)], "unused.svg")


def test_all_benchmarks_that_make_runs_by_name_are_among_those_that_run_together() -> None:
    makefile = (Path(__file__).resolve().parents[3] / "Makefile").read_text(encoding="utf-8")
    assert set(re.findall(r"-m benchmarks\.bench_(\w+)", makefile)) <= BENCHMARKS.keys()
