import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.text import Text

from p2ptrain.cli.screen.lines import bar, job_line, model_line, peer_lines, swarm_lines
from p2ptrain.cli.screen.swarm_view import block, frame, rendered, what_changes
from p2ptrain.cli.screen.table import clipped, plain_table, table_lines
from p2ptrain.network.records.evaluation import Evaluation, PrivacyLoss
from p2ptrain.node.reports.jobs import Job
from p2ptrain.status.progress import PeerProgress
from p2ptrain.status.snapshot import build_snapshot
from p2ptrain.status.tracker import SwarmTracker
from p2ptrain.status.views import Rates, Snapshot, StageView
from tests.support.web.made_up_swarm import MadeUpSwarm
from tests.support.web.watched import snapshot_of, trainer
from tests.unit.cli.screen.test_table import COMMITTED, TRAINER

WIDTHS = (40, 80, 120)
HOSTILE_NAME = "\x1b[2J[bold]日本語\u202e\x07\u05d0\u05d1"
PROGRESS = PeerProgress(
    record=replace(TRAINER, trained_tokens=12_000, trained_rounds=4, round_tokens=600),
    phase="idle", seconds_to_round=4.2, in_round=(600, 1000), aborted=1,
    jobs=(Job("downloading the state", "bytes", 12_000_000, 48_000_000, 3.0),), is_leaving=False,
)  # fmt: skip


def looked_at(num_peers: int, **options: Any) -> Snapshot:
    """A made-up swarm after two looks, 21 seconds apart."""
    now = [1e9]
    swarm = MadeUpSwarm(num_peers, clock=lambda: now[0], **options)
    tracker = SwarmTracker(swarm.swarm, now[0])
    for seconds in (21, 0):
        tracker.take_in(asyncio.run(swarm.look()))
        now[0] += seconds
    return build_snapshot(tracker.observation(), now[0])


def plain(lines: Sequence[Text]) -> str:
    return "\n".join(line.plain for line in lines)


def fits(lines: Sequence[Text], width: int) -> bool:
    return all(line.cell_len <= width and line.plain.isprintable() for line in lines)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_peer_fits_its_terminal_whatever_it_is_called(width: int) -> None:
    for name in ("maple", HOSTILE_NAME, "日" * 64, "W" * 64):
        record = replace(PROGRESS.record, name=name, note=name)
        lines = peer_lines(replace(PROGRESS, record=record), 61, name, snapshot_of([record]), width)
        assert fits(lines, width), plain(lines)
        assert not any(span.style == "bold" and "日本" in line.plain[span.start : span.end]
                       for line in lines[1:] for span in line.spans)  # fmt: skip


def test_a_peer_shows_its_state_round_contribution_traffic_and_jobs() -> None:
    snapshot = snapshot_of([PROGRESS.record], rates={PROGRESS.record.peer: Rates(5000, 6000)})
    shown = plain(peer_lines(PROGRESS, 3723, "demo", snapshot, 120))
    for text in (
        "trainer-1 in demo  1:02:03", "training  round 5", "60%", "next in 4.2 s", "600 of 1.0k tokens",
        "loss 2.500  1.2k tokens/s  last round 2 of 3 peers, 0.5 s, without this peer's work",
        "12.0k tokens in 4 rounds", "1 aborted", "1.5 MB sent, 0 B received  now 5.0 kB/s and 6.0 kB/s",
        "reached directly", "25%  downloading the state  12.0 MB of 48.0 MB  9.0 s left",
    ):  # fmt: skip
        assert text in shown


def test_a_peer_says_what_it_does() -> None:
    def doing(**changes: Any) -> str:
        return peer_lines(replace(PROGRESS, **changes), 1, "demo", None, 80)[1].plain

    assert "forming a group" in doing(phase="matchmaking")
    assert "averaging" in doing(phase="reduce")
    assert "leaving" in doing(is_leaving=True)
    assert "taking on the swarm's state" in doing(record=replace(TRAINER, state="syncing"))
    aborted = replace(TRAINER, last_rounds=(replace(COMMITTED, committed=False, reason="nobody came"),))
    assert "not committed: nobody came" in plain(peer_lines(replace(PROGRESS, record=aborted), 1, "x", None, 80))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_swarm_of_hostile_peers_fits_the_terminal(width: int) -> None:
    quiet = looked_at(40, num_astray=2)
    snapshot = replace(quiet, peers=tuple(replace(each, name=HOSTILE_NAME) for each in quiet.peers))
    lines = frame(snapshot, width, 24)
    assert len(lines) <= 23
    assert fits(swarm_lines(snapshot, width), width)
    # A table whose last columns cannot be left out is cut by the terminal below some width.
    assert fits(lines, max(width, 60))
    assert f"and {len(snapshot.peers) - 1} more" not in plain(lines)
    assert " more" in lines[-1].plain


def test_those_that_deserve_a_look_come_first_and_the_rest_is_counted() -> None:
    snapshot = looked_at(60, num_astray=2)
    shown = plain(frame(snapshot, 100, 24))
    assert shown.count(" astray ") == 2
    rows = shown[shown.index("\npeer ") :].splitlines()[3:]
    assert rows[-1] == f"and {len(snapshot.peers) - len(rows) + 1} more"
    everybody = plain(frame(snapshot, 100, 100))
    names = [row.split()[0] for row in everybody[everybody.index("\npeer ") :].splitlines()[3:]]
    assert names == sorted(names, key=str.casefold)
    assert len(names) == len(snapshot.peers)


def test_the_terminal_says_what_the_status_page_says() -> None:
    snapshot = looked_at(24, num_astray=1)
    shown = plain(frame(snapshot, 200, 60))
    assert f"{snapshot.headline.health.capitalize()}: {snapshot.headline.summary}" in shown
    assert all(reason in shown for reason in snapshot.headline.reasons[:3])
    assert f"{len(snapshot.stages[0].hosts)} replicas" in shown


def test_a_model_that_is_not_cut_has_one_line() -> None:
    whole = StageView(0, (0, 4), ("a", "b"), (), 0, 1.0, None, False, "")
    assert model_line(whole, 80).plain == "model    ████  2 replicas  4 blocks  losing any one breaks nothing"
    alone = replace(whole, hosts=("a",), syncing=("c",), risk="only Ada holds the model")
    assert model_line(alone, 80).plain == "model    ▂▂▂▂  1 replica  1 on the way  4 blocks"
    assert "····  0 replicas" in model_line(replace(whole, hosts=()), 80).plain


def test_a_block_is_plain_and_changes_with_states_and_rounds_alone() -> None:
    snapshot = looked_at(10)
    text = block(snapshot)
    assert text.replace("\n", "").isprintable()
    assert text.startswith("swarm made-up-swarm: ")
    first, *others = [peer.record for peer in snapshot.peers]
    richer = snapshot_of([replace(first, bytes_sent=5, loss=1.0), *others])
    assert what_changes(richer) == what_changes(snapshot_of([first, *others]))
    assert what_changes(snapshot_of([replace(first, state="draining"), *others])) != what_changes(richer)


def test_bars_can_be_told_apart_without_colours() -> None:
    assert bar(0, 10, 40).plain == "─" * 10
    assert bar(5, 10, 40).plain == "━" * 5 + "─" * 5
    assert bar(99, 10, 40).plain == "━" * 10
    moving = {bar(0, 0, 40, seconds / 4).plain for seconds in range(20)}
    assert len(moving) > 5
    assert {text.count("━") for text in moving} == {2}


@pytest.mark.parametrize("width", WIDTHS)
def test_a_job_of_unknown_length_shows_what_is_known(width: int) -> None:
    assert fits([job_line(Job("x" * 200, "bytes", 5, 0, 1e6), width)], width)
    assert "meeting the swarm" in job_line(Job("meeting the swarm", "", 0, 0, 0.5), width).plain
    windows = job_line(Job("measuring", "windows", 32, 128, 0.5), 80).plain
    assert "25%  measuring  32 of 128 windows" in windows


def test_wide_characters_take_two_columns() -> None:
    assert clipped("日本語", 5) == "日本…"
    assert clipped("日本語", 6) == "日本語"
    rows = [("日" * 30, *[""] * 11), ("plain", "training", *[""] * 10)]
    header, wide, narrow = [Text(line) for line in plain_table(rows, 120).splitlines()]
    assert wide.cell_len <= 24
    assert header.plain.index("state") == narrow.plain.index("training") == wide.cell_len + 2
    assert len(table_lines(rows, 80, 1)) == 3


def test_the_largest_loss_of_privacy_and_the_sites_at_rest_are_told() -> None:
    spent = trainer("a", state="resting", privacy=PrivacyLoss(7.991, 8.0, 1e-5))
    snapshot = snapshot_of([spent, trainer("b", privacy=PrivacyLoss(2.5, 8.0, 1e-5)), trainer("c")])
    told = "ε 8.00 of 8, δ 1e-05 at most at one site, 1 site at rest"
    assert f"privacy: {told}" in rendered(snapshot)
    assert "ε 8.00 of 8" in "".join(each.plain for each in swarm_lines(snapshot, 120))
    assert "privacy" not in rendered(snapshot_of([trainer("c")]))


def test_the_pooled_measurement_is_over_the_sites_of_its_metric() -> None:
    told = {"a": "accuracy", "b": "accuracy", "c": "loss"}
    records = [trainer(name, evaluation=Evaluation(metric, 3, 0.5, 0.1, 64)) for name, metric in told.items()]
    assert "held out: accuracy 0.500 ± 0.139 (95 %), over 2 sites" in rendered(snapshot_of(records))
