from __future__ import annotations

import json
from dataclasses import replace

import pytest

from p2ptrain.cli.screen.table import (
    COLUMNS,
    committed_rounds,
    fit_columns,
    human_time,
    most_tokens,
    peer_row,
    plain_table,
    present_state,
    printable,
    record_values,
    rounds_line,
    table_lines,
)
from p2ptrain.network.records.record import PeerRecord, RoundReport

COMMITTED = RoundReport(round=4, committed=True, reason="", seconds=0.5, members=3, contributors=2)
TRAINER = PeerRecord(
    peer="Qm" + "a" * 44, name="trainer-1", version="0", protocol=1, role="trainer", state="training", device="cpu",
    round=5, lineage=bytes(32), digest=bytes([171]) * 32, lineage_tokens=0, round_tokens=0, loss=2.5,
    tokens_per_second=1234.0, bytes_sent=1_500_000, bytes_received=0, reachability="direct", addresses=(),
    started_at=0.0, last_rounds=(COMMITTED,),
)  # fmt: skip


def test_a_row_has_one_cell_for_each_column() -> None:
    row = dict(zip(COLUMNS, peer_row(TRAINER), strict=True))
    assert row["loss"] == "2.500"
    assert row["digest"] == "abababab"
    assert row["group"] == "3"
    bootstrap = dict(zip(COLUMNS, peer_row(replace(TRAINER, role="bootstrap", last_rounds=(), loss=None)), strict=True))
    assert (bootstrap["state"], bootstrap["round"]) == ("training", "")


def test_what_a_peer_does_not_have_yet_is_left_empty() -> None:
    new = replace(TRAINER, state="starting", digest=bytes(32), loss=None, tokens_per_second=0.0, last_rounds=())
    row = dict(zip(COLUMNS, peer_row(new), strict=True))
    assert [name for name, cell in row.items() if not cell] == ["stage", "tokens/s", "loss", "given", "group", "digest"]


def test_a_strangers_name_cannot_command_the_terminal() -> None:
    assert printable("a\x1b[2Jb\u202e\nc") == "a?[2Jb??c"
    assert "\x1b" not in plain_table([peer_row(replace(TRAINER, name="\x1b[2J"))])


def test_a_record_becomes_json() -> None:
    values = json.loads(json.dumps(record_values(TRAINER)))
    assert values["digest"] == "ab" * 32
    assert values["last_rounds"][0]["committed"] is True
    assert values["last_rounds"][0]["digest"] == "00" * 32


@pytest.mark.parametrize(("seconds", "text"), [(7.9, "0:07"), (754, "12:34"), (3723, "1:02:03")])
def test_time_is_shown_in_minutes_and_seconds(seconds: float, text: str) -> None:
    assert human_time(seconds) == text


BUSY = [
    peer_row(replace(TRAINER, name=f"trainer-{number}", bytes_sent=123_000_000, bytes_received=123_000_000))
    for number in range(1, 9)
]


def test_eight_peers_fit_in_80_columns_with_nothing_cut() -> None:
    lines = [line.plain for line in table_lines(BUSY, 80, 20)]
    assert max(map(len, lines)) < 80
    assert lines[0].split() == ["peer", "state", "round", "tokens/s", "loss", "group", "sent", "received", "digest"]
    assert lines[2].split() == [
        "trainer-1",
        "training",
        "5",
        "1.2k",
        "2.500",
        "3",
        "123",
        "MB",
        "123",
        "MB",
        "abababab",
    ]
    assert len(lines) == 2 + len(BUSY)
    assert "…" not in "".join(lines)


def test_a_wide_terminal_shows_every_column_and_a_narrow_one_the_most_important() -> None:
    assert fit_columns(BUSY, 200)[0] == tuple(name for name in COLUMNS if name != "stage")
    narrow = fit_columns([peer_row(replace(TRAINER, name="x" * 64))], 50)
    assert {"peer", "state", "round", "loss"} <= set(narrow[0])
    assert sum(max(map(len, column)) + 2 for column in zip(*narrow, strict=True)) - 2 <= 50
    assert all(len(line) <= 60 for line in plain_table(BUSY, 60).splitlines())


def test_committed_rounds_are_told_once_each_as_seen_with_most_contributors() -> None:
    other = replace(TRAINER, last_rounds=(replace(COMMITTED, contributors=3), replace(COMMITTED, round=5)))
    rounds = committed_rounds([TRAINER, other], after=0)
    assert [(report.round, report.contributors) for report in rounds] == [(4, 3), (5, 2)]
    assert [report.round for report in committed_rounds([TRAINER, other], after=5)] == [5]
    assert committed_rounds([TRAINER, other], after=6) == []


def test_aborted_rounds_and_bootstrap_peers_are_not_told() -> None:
    aborted = replace(TRAINER, last_rounds=(replace(COMMITTED, committed=False),))
    assert committed_rounds([aborted, replace(TRAINER, role="bootstrap")], after=0) == []


def test_a_line_for_several_rounds_names_them_all_and_hides_no_missing_peer() -> None:
    whole = replace(COMMITTED, contributors=3)
    line = rounds_line([whole, replace(COMMITTED, round=5), replace(whole, round=6)], [TRAINER], "loss 2.500")
    assert line.startswith("rounds 5-7  2/3 peers  averaged in 0.5 s  loss 2.500")
    # Who is behind has another digest, which says nothing about agreement.
    assert "digest" not in line
    one = rounds_line([whole], [TRAINER, replace(TRAINER, round=4, digest=bytes(32))], "")
    assert one == "round 5  3/3 peers  averaged in 0.5 s  digest abababab"


def test_what_is_not_known_yet_is_not_shown() -> None:
    assert present_state([replace(TRAINER, loss=None)], None, None) == ""
    assert (
        present_state([TRAINER, replace(TRAINER, loss=3.0)], 5400.0, 2.7) == "loss 2.750  held-out 2.70  5.4k tokens/s"
    )


def test_the_swarms_tokens_are_those_of_the_trainer_that_is_furthest() -> None:
    behind, ahead = replace(TRAINER, lineage_tokens=5), replace(TRAINER, lineage_tokens=7)
    bootstrap, starting = replace(ahead, role="bootstrap", lineage_tokens=9), replace(ahead, state="starting")
    assert most_tokens([behind, ahead, bootstrap]) == 7
    assert most_tokens([bootstrap, starting]) is None, "the time before training starts does not count"
