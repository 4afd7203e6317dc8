from __future__ import annotations

import json
from dataclasses import replace

import pytest

from p2ptrain.cli.table import (
    COLUMNS,
    human_bytes,
    human_count,
    peer_row,
    plain_table,
    printable,
    record_values,
    round_lines,
)
from p2ptrain.network.records import PeerRecord, RoundReport

COMMITTED = RoundReport(round=4, committed=True, reason="", seconds=0.5, members=3, contributors=2)
TRAINER = PeerRecord(
    peer="Qm" + "a" * 44, name="trainer-1", version="0", protocol=1, role="trainer", state="training", device="cpu",
    round=5, lineage=bytes(32), digest=bytes([171]) * 32, lineage_tokens=0, round_tokens=0, loss=2.5,
    tokens_per_second=1234.0, bytes_sent=1_500_000, bytes_received=0, reachability="direct", addresses=(),
    started_at=0.0, last_rounds=(COMMITTED,),
)  # fmt: skip


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (999.7, "1.0 kB"), (1500, "1.5 kB"), (99_960, "100 kB"), (12_300_000, "12.3 MB"),
     (999_700_000, "1.0 GB"), (4.2e15, "4200.0 TB")],
)  # fmt: skip
def test_bytes_are_shown_with_three_digits(number: float, text: str) -> None:
    assert human_bytes(number) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0"), (940, "940"), (12_345, "12.3k"), (1_200_000, "1.2M")])
def test_counts_are_shown_with_three_digits(number: float, text: str) -> None:
    assert human_count(number) == text


def test_a_row_has_one_cell_for_each_column() -> None:
    row = dict(zip(COLUMNS, peer_row(TRAINER), strict=True))
    assert row["loss"] == "2.500"
    assert row["digest"] == "abababab"
    assert row["group"] == "3"
    bootstrap = dict(zip(COLUMNS, peer_row(replace(TRAINER, role="bootstrap", last_rounds=(), loss=None)), strict=True))
    assert (bootstrap["state"], bootstrap["round"], bootstrap["digest"]) == ("bootstrap", "", "")


def test_a_strangers_name_cannot_command_the_terminal() -> None:
    assert printable("a\x1b[2Jb\u202e\nc") == "a?[2Jb??c"
    assert "\x1b" not in plain_table([peer_row(replace(TRAINER, name="\x1b[2J"))])


def test_a_record_becomes_json() -> None:
    values = json.loads(json.dumps(record_values(TRAINER)))
    assert values["digest"] == "ab" * 32
    assert values["last_rounds"][0]["committed"] is True


def test_each_committed_round_is_told_once_with_the_most_contributors_that_were_seen() -> None:
    other = replace(TRAINER, last_rounds=(replace(COMMITTED, contributors=3), replace(COMMITTED, round=5)))
    lines = round_lines([TRAINER, other], after=0)
    assert [number for number, _ in lines] == [5, 6]
    assert "3/3 peers" in lines[0][1]
    assert round_lines([TRAINER, other], after=6) == []


def test_aborted_rounds_and_bootstrap_peers_give_no_line() -> None:
    aborted = replace(TRAINER, last_rounds=(replace(COMMITTED, committed=False),))
    assert round_lines([aborted, replace(TRAINER, role="bootstrap")], after=0) == []
