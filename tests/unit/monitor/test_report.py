"""The page of a finished run, from the files that a run leaves."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import ConfigError
from p2ptrain.manifest import Manifest, SignedManifest
from p2ptrain.monitor.charts import MAX_POINTS, Series, line_chart, thin, ticks
from p2ptrain.monitor.report import clock, read_lines, read_run, render, site_curves
from p2ptrain.node.reports.summary import to_json
from tests.support.processes.commands import assert_one_line_error, p2ptrain
from tests.support.signers import NamedSigner
from tests.unit.cli.test_summary import of

ALICE = NamedSigner("alice")
NUMBERS = st.floats(-1e9, 1e9, allow_nan=False)


def write_lines(folder: Path, lines: list[dict[str, Any]], name: str = "metrics.jsonl") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def round_line(at: float, number: int, *, committed: bool = True, reason: str = "") -> dict[str, Any]:
    return {
        "time": at, "kind": "round", "round": number, "committed": committed, "reason": reason, "seconds": 0.5,
        "matchmaking_seconds": 0.2, "transfer_seconds": 0.3, "members": 2, "contributors": 2, "loss": 3.0,
        "digest": "d" * 64,
    }  # fmt: skip


def write_run(directory: Path, reason: str = "") -> None:
    for index in range(2):
        lines = [
            {"time": 10.0, "kind": "step", "loss": 5.0, "tokens_per_second": 100.0, "step": 1},
            round_line(11.0, 1),
            round_line(12.0, 2, committed=not reason, reason=reason),
            {"time": 13.0, "kind": "step", "loss": 4.0, "tokens_per_second": 120.0, "step": 2},
        ]
        write_lines(directory / f"t{index}", lines)
        summary = of(name=f"t{index}", tokens=1000, bytes_sent=5000, heldout_loss_after=2.5, state_digest="ab" * 32)
        (directory / f"t{index}" / "summary.json").write_bytes(to_json(summary))


class Tags(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_says_how_the_run_went_and_needs_nothing_else(tmp_path: Path) -> None:
    write_run(tmp_path)
    page = Tags(render(read_run(tmp_path, ALICE)))
    facts = "5.500 → 2.500 nats", "2 committed", "2.0k", "10.0 kB sent", "equal everywhere", "Nothing: every round"
    for fact in facts:
        assert fact in page.text
    names = [name for name, _ in page.found]
    assert "script" not in names
    assert "link" not in names
    assert not [value for _, values in page.found for key, value in values.items() if key in ("src", "href")]
    assert names.count("svg") == 4  # Nobody measured the held-out loss on the way.


def test_what_went_wrong_is_told_and_markup_in_it_is_text(tmp_path: Path) -> None:
    write_run(tmp_path, reason="<img src=x onerror=alert(1)> & late")
    page = render(read_run(tmp_path, ALICE))
    assert "<img" not in page
    assert "<img src=x onerror=alert(1)> & late" in Tags(page).text


def test_the_manifest_is_shown_where_it_was_kept(tmp_path: Path) -> None:
    write_run(tmp_path)
    signed = SignedManifest.create(Manifest(name="kitchen table"), ALICE)
    (tmp_path / "manifest.bin").write_bytes(signed.to_bytes())
    page = Tags(render(read_run(tmp_path, ALICE))).text
    assert "kitchen table" in page
    assert "grace_seconds" in page
    (tmp_path / "manifest.bin").write_bytes(b"rubbish")
    assert "grace_seconds" not in Tags(render(read_run(tmp_path, ALICE))).text


def test_lines_that_cannot_be_read_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"time":2,"kind":"step","loss":1}\nrubbish\n[]\n{"kind":"step"}\n{"time":NaN,"kind":"step"}\n{"time":3,"ki'
    )
    write_lines(tmp_path, [{"time": 1.0, "kind": "step"}], "metrics.jsonl.1")
    lines, skipped = read_lines(path)
    assert [line.time for line in lines] == [1.0, 2.0]
    assert skipped == 5
    assert "5 lines of metrics could not be read" in render(read_run(tmp_path, ALICE))


@pytest.mark.parametrize("value", ["nan", math.inf, True, None, [1]])
def test_what_is_no_number_is_none(tmp_path: Path, value: object) -> None:
    write_lines(tmp_path, [{"time": 1.0, "kind": "step", "loss": value}])
    lines, _ = read_lines(tmp_path / "metrics.jsonl")
    assert lines[0].number("loss") is None


def test_a_run_without_metrics_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no metrics\.jsonl"):
        read_run(tmp_path, ALICE)
    with pytest.raises(ConfigError, match="is not a directory"):
        read_run(tmp_path / "missing", ALICE)


def test_the_command_writes_the_page_and_says_where(tmp_path: Path) -> None:
    write_run(tmp_path)
    done = p2ptrain("report", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "report.html") in done.stdout
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert_one_line_error(p2ptrain("report", str(tmp_path / "t0" / "nothing")), 3, "is not a directory")


@given(NUMBERS, st.floats(0, 1e9), st.integers(2, 8))
def test_ticks_are_few_ascending_and_within_the_range(low: float, span: float, count: int) -> None:
    found = ticks(low, low + span, count)
    assert 1 <= len(found) <= count + 1
    assert found == sorted(found)
    slack = 1e-6 * max(abs(low), span, 1e-30)
    assert low - slack <= found[0] <= found[-1] <= low + span + slack


@given(st.lists(NUMBERS, max_size=4 * MAX_POINTS))
def test_thinning_keeps_order_and_extremes(values: list[float]) -> None:
    points = [(float(index), value) for index, value in enumerate(values)]
    kept = thin(points)
    assert len(kept) <= MAX_POINTS
    assert kept == sorted(kept)
    assert set(kept) <= set(points)
    if values:
        assert max(y for _, y in kept) == max(values)
        assert min(y for _, y in kept) == min(values)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=50))
def test_every_point_lies_within_the_chart(points: list[tuple[float, float]]) -> None:
    markup = line_chart("t", [Series("a", sorted(points))], x_text=str, y_text=str)
    places = re.findall(r"(-?[\d.]+),(-?[\d.]+)", markup) or re.findall(r'cx="(-?[\d.]+)" cy="(-?[\d.]+)"', markup)
    assert places
    assert all(0 <= float(x) <= 720 and 0 <= float(y) <= 240 for x, y in places)


@pytest.mark.parametrize("seconds", [100, 180, 600, 4000, 7 * 3600])
def test_marks_of_the_time_axis_differ(seconds: int) -> None:
    marks = ticks(0, seconds)
    assert len({clock(mark) for mark in marks}) == len(marks)


def test_sites_have_a_line_each_and_a_pooled_one_unless_they_keep_their_measurements(tmp_path: Path) -> None:
    def line(at: float, peer: str, round_: int, mean: float | None, samples: int = 8) -> dict[str, Any]:
        told = {"metric": "accuracy", "round": round_, "mean": mean, "error": None, "samples": samples}
        return {"time": at, "kind": "site", "peer": peer, "round": round_, "evaluation": told if mean else None}

    write_run(tmp_path)
    first = [line(1.0, "QmSiteOne", 1, 0.5), line(2.0, "QmSiteTwo", 2, 0.8, 16), line(3.0, "QmKeeper", 2, 0.1)]
    second = [line(2.5, "QmSiteTwo", 2, 0.8, 16), line(4.0, "QmSiteOne", 4, 0.6), line(5.0, "QmKeeper", 5, None)]
    write_lines(tmp_path / "t0", first, "sites.jsonl")
    write_lines(tmp_path / "t1", second, "sites.jsonl")
    run = read_run(tmp_path, ALICE)
    [(title, (whole, *sites))] = site_curves(run.sites)
    assert title == "Held-out accuracy of the sites"
    assert {each.name: list(each.points) for each in sites} == {
        "mSiteOne": [(1, 0.5), (4, 0.6)],
        "mSiteTwo": [(2, 0.8)],
    }
    assert whole.points == [(1, 0.5), (2, pytest.approx(0.7)), (4, pytest.approx(2.2 / 3))]
    page = Tags(render(run)).text
    assert "round 4" in page
    assert "mSiteTwo" in page
