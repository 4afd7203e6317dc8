"""Stages on a terminal: one line each, the slowest marked, in any width, and in words what a loss would break."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from p2ptrain.cli.local_swarm import to_text
from p2ptrain.cli.screen.lines import peer_lines, swarm_lines
from p2ptrain.cli.screen.swarm_view import json_of, rendered
from p2ptrain.cli.screen.table import COLUMNS, peer_row, risk_lines, rounds_line, stage_lines
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.node.reports.summary import Summary, combine
from p2ptrain.status.serving import NONE, Served
from p2ptrain.status.views import StageView
from tests.support.web.served import served
from tests.support.web.watched import (
    CUT,
    STRANGE,
    aborted,
    after_looks,
    feeder,
    host,
    pipeline,
    report,
    snapshot_of,
    trainer,
)
from tests.unit.cli.screen.test_lines import PROGRESS, fits, plain
from tests.unit.cli.test_summary import of

WIDTHS = (40, 50, 80)


def without(*peers: str) -> list[PeerRecord]:
    return [record for record in pipeline() if record.peer not in peers]


def stages_of(records: Sequence[PeerRecord]) -> tuple[StageView, ...]:
    return snapshot_of(records, swarm=CUT).stages


def test_each_stage_has_a_line_and_the_slowest_is_marked() -> None:
    assert plain(stage_lines(stages_of(without("b2")), 80)).splitlines() == [
        "stage  blocks  hosts  waiting  tokens/s  load",
        "0      0-1         2        6       200   50%",
        "1      2-3         2        6       200   50%",
        "2      4-5         1        3       100  100%  one host, bottleneck",
        "3      6-7         2        6       200   50%",
    ]
    assert plain(stage_lines(stages_of([*without("a1", "b1"), host("c", 1, state="syncing")]), 80)).splitlines()[2] == (
        "1      2-3       0+1        0            no host"
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_stages_fit_the_terminal_and_lose_what_says_least(width: int) -> None:
    lines = stage_lines(stages_of(without("b2", "a0", "b0")), width)
    assert fits(lines, width)
    assert "no host" in lines[1].plain
    assert "hosts" in lines[0].plain
    assert ("waiting" in lines[0].plain) == (width > 40)


def test_of_many_stages_those_are_shown_that_need_hosts_most() -> None:
    many = [
        StageView(number, (number, number + 1), ("a", "b") if number != 40 else (), (), 0, 1.0, None, False, "")
        for number in range(64)
    ]
    shown = plain(stage_lines(many, 80, 8)).splitlines()
    assert len(shown) == 10
    assert any(line.startswith("40 ") for line in shown)
    assert shown[-1] == "and 56 more stages"


def shown(records: Sequence[PeerRecord], width: int | None = None, **changes: Any) -> str:
    """What ``status`` prints of these peers."""
    return rendered(snapshot_of(records, **changes), width)


def test_a_loss_is_said_in_words() -> None:
    assert risk_lines(stages_of(pipeline()), 80) == ["losing any one host breaks nothing"]
    stages = stages_of(without("b1", "a2", "b2"))
    assert risk_lines(stages, None) == [
        "! stage 1 has one host, a1's laptop: losing it stops training", "! stage 2 has no host: training waits",
    ]  # fmt: skip
    assert all(len(line) <= 40 for line in risk_lines(stages, 40))


def test_status_says_whether_the_swarm_is_healthy_and_why_not() -> None:
    assert shown([]).splitlines()[1] == "Empty: Nobody trains in this swarm yet"
    assert shown([trainer("a"), trainer("b")]).splitlines()[1] == "Healthy: 2 peers train; no round is committed yet"
    assert "losing any one host breaks nothing" in shown(pipeline(), swarm=CUT)
    failing = [trainer(name, last_rounds=tuple(aborted(number) for number in range(3, 8))) for name in "ab"]
    lines = shown(failing, 80).splitlines()
    assert lines[1].startswith("Degraded: 2 peers train, and rounds fail")
    assert lines[2].startswith("! rounds fail")
    values = json.loads(json_of(snapshot_of(failing)))
    assert values["health"] == "degraded"
    assert values["summary"] in lines[1]
    assert values["reasons"]


def test_status_says_what_is_served_if_anybody_does() -> None:
    serving = [trainer("a", serving=served(1000.0)), trainer("b", serving=served(500.0)), trainer("c")]
    (told,) = [line for line in shown(serving).splitlines() if line.startswith("serving: ")]
    assert told.startswith("serving: 2 peers, 4 sessions, 750 requests, 15 failed, first token 0.4")
    assert "tokens/s" not in told, "one look knows no rate"
    assert "serving" not in shown([trainer("c")])
    snapshot = snapshot_of(serving, served=Served(NONE, served(600.0).totals, 60.0))
    assert "serves" in plain(swarm_lines(snapshot, 120))
    assert "serves" not in plain(swarm_lines(snapshot_of([trainer("c")]), 120))


def test_status_of_a_model_that_is_not_known_here_says_so() -> None:
    text = shown(without("b1"), 80, swarm=STRANGE)
    assert ["stage", "hosts", "waiting", "tokens/s", "load"] in [line.split() for line in text.splitlines()]
    assert text.index("! stage 1 has one host") < text.index(STRANGE.missing) < text.index("\npeer ")
    snapshot = snapshot_of(pipeline(), swarm=STRANGE)
    assert json.loads(json_of(snapshot))["missing"] == STRANGE.missing
    assert "stages are shown without their blocks" in plain(swarm_lines(snapshot, 120))
    lines = peer_lines(replace(PROGRESS, record=host("a0", 0, 4), jobs=()), 1, "demo", snapshot, 80)
    assert "hosting  stage 0  100 tokens/s" in plain(lines)


def test_status_for_machines_has_stages_too() -> None:
    values = json.loads(
        json_of(snapshot_of([*pipeline(), trainer("z", addresses=("/ip4/10.1.2.3/tcp/1",))], swarm=CUT))
    )
    assert [stage["hosts"] for stage in values["stages"]][1] == ["a1", "b1"]
    assert values["peers"][0]["stages"][1]["unit"] == 4
    assert len(values["peers"][0]["stages"][0]["digest"]) == 64
    assert [peer["addresses"] for peer in values["peers"]][-1] == ["/ip4/10.1.2.3/tcp/1"]


def test_a_row_names_the_stages_of_a_host_but_not_what_it_shares() -> None:
    stage, number = COLUMNS.index("stage"), COLUMNS.index("round")
    hosts, feeds = [peer_row(peer, 4) for peer in snapshot_of([host("a", 3, 4), feeder("f")], swarm=CUT).peers]
    assert (hosts[stage], feeds[stage], feeds[number]) == ("3", "feeds", "")
    assert peer_row(snapshot_of([trainer("a")]).peers[0])[stage] == ""


def test_the_live_view_of_a_swarm_and_of_a_host_show_stages() -> None:
    snapshot = snapshot_of(without("b2"), swarm=CUT)
    assert "bottleneck" in plain(swarm_lines(snapshot, 80))

    def shown(record: PeerRecord, width: int = 80) -> str:
        lines = peer_lines(replace(PROGRESS, record=record, jobs=()), 1, "demo", snapshot, width)
        assert fits(lines, width)
        return plain(lines)

    first = shown(host("a0", 0, 4))
    assert "hosting  stage 0, blocks 0-1  100 tokens/s  3 waiting  with 1 other" in first
    assert first.count("hosting") == 1
    assert "loss 2.500" in first
    assert "bottleneck  the only host" in shown(host("a2", 2))
    assert "hosting" not in shown(feeder("f"))
    shown(host("a0", 0, 4), 40)


def test_a_line_of_a_round_has_the_members_of_all_stages_and_a_digest_for_each() -> None:
    records = [
        replace(host(f"a{stage}", stage), last_rounds=(report(7, members=2, contributors=2),)) for stage in range(4)
    ]
    snapshot = after_looks(records, swarm=CUT)
    line = rounds_line(snapshot.rounds, snapshot.peers, "")
    assert line.startswith("round 8  8/8 peers")
    digests = [f"{stage}:{record.digest.hex()[:8]}" for stage, record in enumerate(records)]
    assert line.endswith(f"stage digests {' '.join(digests)}")


def test_a_summary_compares_ends_within_each_stage() -> None:
    def ended(stage: int | None, digest: str) -> Summary:
        return of(stage=stage, state_digest=digest)

    good = {"a": ended(0, "aa"), "b": ended(1, "bb"), "c": ended(1, "bb"), "f": ended(None, "")}
    assert "equal in each of 2 stages 0:aa 1:bb" in to_text(combine(good, 4))
    assert "they differ 0:aa 1:bb 1:cc" in to_text(combine({**good, "c": ended(1, "cc")}, 4))
