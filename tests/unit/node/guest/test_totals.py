"""Totals of a peer, over all of its runs."""

import json
from pathlib import Path

import pytest

from p2ptrain.cli.main import main
from p2ptrain.node.guest.totals import TOTALS_FILE, GivenBook, read_totals
from tests.support.records import record_of


def test_totals_go_on_over_runs_and_over_a_hosts_stages(tmp_path: Path) -> None:
    for _ in range(2):
        book = GivenBook(tmp_path, record_of("x"))
        book.add(record_of("x", trained_rounds=2, trained_tokens=20, bytes_sent=100), 10.0)
        book.add(record_of("x", trained_rounds=3, trained_tokens=30, bytes_sent=150), 10.0)
        book.add(record_of("x", trained_rounds=1, trained_tokens=5, bytes_sent=160), 0.0)  # Of another stage.
        book.save()
    totals = read_totals(tmp_path)
    assert totals is not None
    given = (totals.runs, totals.rounds, totals.tokens, totals.seconds, totals.bytes_sent)
    assert given == (2, 8, 70, 40.0, 320)


def test_another_identity_begins_anew_and_a_damaged_file_too(tmp_path: Path) -> None:
    GivenBook(tmp_path, record_of("x")).save()
    assert GivenBook(tmp_path, record_of("y")).totals.runs == 1
    (tmp_path / TOTALS_FILE).write_bytes(b"{")
    assert read_totals(tmp_path) is None
    assert GivenBook(tmp_path, record_of("x")).totals.runs == 1


def test_status_shows_what_this_machines_peers_gave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["status", "--mine"]) == 3
    assert "no peer has run" in capsys.readouterr().err
    run_dir = Path("runs/join-1")
    run_dir.mkdir(parents=True)
    book = GivenBook(run_dir, record_of("x"))
    book.add(record_of("x", trained_rounds=3, trained_tokens=5000, bytes_sent=2_000_000), 7200.0)
    book.save()
    assert main(["status", "--mine"]) == 0
    shown = capsys.readouterr().out
    assert "runs/join-1 (x): not running" in shown
    assert "5.0k tokens in 3 rounds, 2.0 h" in shown.replace("5,000", "5.0k").replace("5.00k", "5.0k")
    for folder in ("runs/join-1", "runs", "."):
        assert main(["status", "--mine", folder, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[0]["tokens"] == 5000


def test_status_wants_a_link_or_mine() -> None:
    assert main(["status"]) == 2
    assert main(["status", "p2ptrain://x", "--mine"]) == 2
