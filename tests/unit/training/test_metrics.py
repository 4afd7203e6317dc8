"""Metrics survive crashes and full disks, and stay bounded."""

import json
import logging
import math
import os
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.training import metrics
from p2ptrain.training.metrics import MetricsWriter


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a file, without its torn and garbage lines."""
    found = []
    for line in path.read_bytes().splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return [record for record in found if isinstance(record, dict)]


def test_what_is_written_is_read_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 5.0)
    path = tmp_path / "new" / "metrics.jsonl"
    with closing(MetricsWriter(path)) as writer:
        writer.write("round", round=1, loss=2.5, members=["a"])
        assert [record["round"] for record in read_metrics(path)] == [1]  # readable while it is open
        writer.write("round", round=2)
    assert read_metrics(path) == [
        {"time": 5.0, "kind": "round", "round": 1, "loss": 2.5, "members": ["a"]},
        {"time": 5.0, "kind": "round", "round": 2},
    ]


@pytest.mark.parametrize("before", [b'{"kind":"a"}\n{"kind":"b","lo', b'\xff\xfe\n[1]\n\n{"kind":"a"}\n'])
def test_torn_and_garbage_lines_are_skipped_and_do_not_spoil_the_next(tmp_path: Path, before: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(before)
    assert [record["kind"] for record in read_metrics(path)] == ["a"]
    with closing(MetricsWriter(path)) as writer:
        writer.write("c")
    assert [record["kind"] for record in read_metrics(path)] == ["a", "c"]


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsWriter(path)) as writer:
        writer.write("round", loss=math.nan, nested=[{"norm": math.inf}])
    (record,) = read_metrics(path)
    assert (record["loss"], record["nested"]) == (None, [{"norm": None}])


def test_size_is_bounded_with_one_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_BYTES", 1000)
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsWriter(path)) as writer:
        for number in range(200):
            writer.write("round", round=number)
    old = path.with_name("metrics.jsonl.1")
    assert sorted(os.listdir(tmp_path)) == [path.name, old.name]
    assert max(path.stat().st_size, old.stat().st_size) <= 1000
    rounds = [record["round"] for file in (old, path) for record in read_metrics(file)]
    assert rounds == list(range(rounds[0], 200))


def test_a_full_disk_warns_once_and_writing_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsWriter(path)) as writer, caplog.at_level(logging.WARNING):
        writer.write("before")
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            writer.write("lost")
            writer.write("lost")
        writer.write("after")
    assert [record["kind"] for record in read_metrics(path)] == ["before", "after"]
    assert len([record for record in caplog.records if "cannot write metrics" in record.message]) == 1


def full(*arguments: object) -> int:
    raise OSError(28, "No space left on device")
