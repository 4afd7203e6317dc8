from dataclasses import replace

import pytest

from p2ptrain.cli.screen.table import (
    COLUMNS,
    PEERS,
    human_time,
    peer_row,
    plain_table,
    present_state,
    printable,
    rounds_line,
    table_lines,
)
from p2ptrain.network.records.record import PeerRecord, RoundReport
from tests.support.web.watched import rounds_of, snapshot_of, trainer, views_of

COMMITTED = RoundReport(round=4, committed=True, reason="", seconds=0.5, members=3, contributors=2)
TRAINER = trainer(
    "Qm" + "a" * 44, name="trainer-1", round=5, digest=bytes([171]) * 32, tokens_per_second=1234.0, round_tokens=0,
    bytes_sent=1_500_000, bytes_received=0, last_rounds=(COMMITTED,), trained_tokens=0, trained_rounds=0,
)  # fmt: skip


def row(record: PeerRecord) -> tuple[str, ...]:
    return peer_row(views_of(record)[0])


def behind(record: PeerRecord) -> PeerRecord:
    return replace(record, peer="behind", round=record.round - 1, digest=bytes(32))


def test_a_row_has_one_cell_for_each_column() -> None:
    cells = dict(zip(COLUMNS, row(TRAINER), strict=True))
    assert cells["loss"] == "2.500"
    assert cells["digest"] == "abababab"
    assert cells["group"] == "3"
    bootstrap = dict(zip(COLUMNS, row(replace(TRAINER, role="bootstrap", last_rounds=(), loss=None)), strict=True))
    assert (bootstrap["state"], bootstrap["round"]) == ("training", "")


def test_what_a_peer_does_not_have_yet_is_left_empty() -> None:
    new = replace(TRAINER, state="starting", digest=bytes(32), loss=None, tokens_per_second=0.0, last_rounds=())
    cells = dict(zip(COLUMNS, row(new), strict=True))
    empty = [name for name, cell in cells.items() if not cell]
    assert empty == ["stage", "tokens/s", "loss", "given", "group", "digest"]


def test_a_strangers_name_cannot_command_the_terminal() -> None:
    assert printable("a\x1b[2Jb\u202e\nc") == "a?[2Jb??c"
    assert "\x1b" not in plain_table([row(replace(TRAINER, name="\x1b[2J"))])


@pytest.mark.parametrize(("seconds", "text"), [(7.9, "0:07"), (754, "12:34"), (3723, "1:02:03")])
def test_time_is_shown_in_minutes_and_seconds(seconds: float, text: str) -> None:
    assert human_time(seconds) == text


BUSY = [
    row(replace(TRAINER, name=f"trainer-{number}", bytes_sent=123_000_000, bytes_received=123_000_000))
    for number in range(1, 9)
]


def test_eight_peers_fit_in_80_columns_with_nothing_cut() -> None:
    lines = [line.plain for line in table_lines(BUSY, 80, 20)]
    assert max(map(len, lines)) < 80
    assert lines[0].split() == ["peer", "state", "round", "tokens/s", "loss", "group", "sent", "received", "digest"]
    assert " ".join(lines[2].split()) == "trainer-1 training 5 1.2k 2.500 3 123 MB 123 MB abababab"
    assert len(lines) == 2 + len(BUSY)
    assert "…" not in "".join(lines)


def test_a_wide_terminal_shows_every_column_and_a_narrow_one_the_most_important() -> None:
    assert PEERS.fit(BUSY, 200)[0] == tuple(name for name in COLUMNS if name != "stage")
    narrow = PEERS.fit([row(replace(TRAINER, name="x" * 64))], 50)
    assert {"peer", "state", "round", "loss"} <= set(narrow[0])
    assert sum(max(map(len, column)) + 2 for column in zip(*narrow, strict=True)) - 2 <= 50
    assert all(len(line) <= 60 for line in plain_table(BUSY, 60).splitlines())


def test_a_line_for_several_rounds_names_them_all_and_hides_no_missing_peer() -> None:
    told = replace(TRAINER, last_rounds=(replace(COMMITTED, round=5), COMMITTED))
    [later, missed] = snapshot_of([TRAINER], rounds_of(told)).rounds
    line = rounds_line([missed, later, replace(later, round=6, contributors=3)], views_of(TRAINER), "loss 2.500")
    assert line.startswith("rounds 5-7  2/3 peers  averaged in 0.5 s  loss 2.500")
    # Who is behind has another digest, which says nothing about agreement.
    assert "digest" not in line
    one = rounds_line([replace(missed, contributors=3)], views_of(TRAINER, behind(TRAINER)), "")
    assert one == "round 5  3/3 peers  averaged in 0.5 s  digest abababab"


def test_what_is_not_known_yet_is_not_shown() -> None:
    new, known = snapshot_of([replace(TRAINER, loss=None)], tokens_per_second=None), snapshot_of([TRAINER])
    assert present_state(new.headline, None) == ""
    assert present_state(known.headline, 2.7) == "loss 2.500  held-out 2.70  300 tokens/s"
