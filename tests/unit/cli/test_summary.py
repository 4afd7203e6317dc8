import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from p2ptrain.cli.local_swarm import to_text
from p2ptrain.node.reports.summary import Summary, combine, read_summary, to_json

PROMISED = {
    "heldout_loss_before", "heldout_loss_after", "tokens_per_second", "tokens", "bytes_sent", "bytes_received",
    "rounds_committed", "rounds_aborted", "state_digests", "seconds", "peers",
}  # fmt: skip


def of(**values: Any) -> Summary:
    usual = Summary(
        peer="Qm", name="a", stage=None, heldout_loss_before=5.5, heldout_loss_after=2.0, tokens=100, stage_tokens=0,
        tokens_per_second=10.0, seconds=10.0, bytes_sent=7, bytes_received=6, rounds_committed=4, rounds_aborted=1,
        state_digest="ab", round=4, exit_reason="signal",
    )  # fmt: skip
    return replace(usual, **values)


def test_trainers_add_up() -> None:
    summary = combine({"a": of(), "b": of(seconds=20.0, heldout_loss_after=3.0, rounds_committed=3)}, peers=2)
    assert summary.tokens == 200
    assert summary.tokens_per_second == 200 / 20.0
    assert (summary.heldout_loss_before, summary.heldout_loss_after) == (5.5, 2.5)
    assert (summary.bytes_sent, summary.bytes_received) == (14, 12)
    assert (summary.rounds_committed, summary.rounds_aborted) == (4, 1)
    assert summary.state_digests == {"a": "ab", "b": "ab"}
    assert "all equal" in to_text(summary)
    assert "differ" in to_text(combine({"a": of(), "b": of(state_digest="cd")}, peers=2))


def test_tokens_of_a_pipeline_count_once_all_stages_have_committed_them() -> None:
    hosts = [of(stage=0, stage_tokens=300), of(stage=1, stage_tokens=100), of(stage=1, stage_tokens=150)]
    feeder = of(stage=None, stage_tokens=0, tokens=900, state_digest="")
    assert combine({str(number): each for number, each in enumerate([*hosts, feeder])}, peers=4).tokens == 250


def test_a_trainer_that_died_leaves_the_others_numbers() -> None:
    summary = combine({"a": of(heldout_loss_after=None)}, peers=3)
    assert (summary.peers, summary.reporting_peers, summary.heldout_loss_after) == (3, 1, None)
    assert "1 of 3" in to_text(summary)
    assert combine({}, peers=1).tokens_per_second == 0.0
    assert "none" in to_text(combine({}, peers=1)), "nothing at all is a summary, too"


def test_the_json_has_the_promised_keys() -> None:
    assert set(json.loads(to_json(combine({"a": of()}, peers=1)))) >= PROMISED


def test_a_torn_or_missing_summary_is_none(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    assert read_summary(path) is None
    for text in ("", '{"a": ', "[1]", '{"name": "a"}'):
        path.write_text(text)
        assert read_summary(path) is None
    path.write_bytes(to_json(of(heldout_loss_after=math.nan)))
    assert read_summary(path) == of(heldout_loss_after=None)
