"""An auxiliary from a role file helps three trainers that `p2ptrain up` started: real processes, real daemons."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.daemons import wait_until
from tests.support.processes.swarmlet import background_command, nothing_left_behind, run_command

TINY = (
    "--set", "model.layers=1", "--set", "model.hidden=32", "--set", "model.heads=2", "--set", "model.kv_heads=2",
    "--set", "model.intermediate=64", "--set", "model.context=32", "--set", "training.warmup_steps=4",
    "--set", "averaging.auxiliaries=1", "--no-monitor", "--device", "cpu", "--threads", "1",
)  # fmt: skip
ROLE = """
role = "auxiliary"
name = "helper"
run_dir = "helper"

[network]
listen = ["/ip4/127.0.0.1/tcp/0"]
"""

pytestmark = pytest.mark.timeout(300)


def metrics(run_dir: Path, trainer: str) -> list[dict[str, Any]]:
    """The rounds that a trainer committed so far."""
    path = run_dir / trainer / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [values for values in (json.loads(line) for line in lines if line.endswith("}")) if values.get("committed")]


def test_an_auxiliary_helps_trainers_leaves_in_good_order_and_they_go_on(tmp_path: Path) -> None:
    run_dir, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 2000)
    role = tmp_path / "auxiliary.toml"
    role.write_text(ROLE)
    up_log, log = tmp_path / "up.log", tmp_path / "auxiliary.log"
    arguments: list[str | Path] = ["--minutes", "5", "--run-dir", run_dir, "--data", text]
    with nothing_left_behind(), background_command(up_log, "up", "--peers", "3", *arguments, *TINY) as up:
        wait_until(lambda: up.poll() is not None or len(metrics(run_dir, "trainer-1")) > 0, 120)
        assert up.poll() is None, up_log.read_text()
        link = (run_dir / "bootstrap" / "link.txt").read_text().strip()
        with background_command(log, "peer", role, "--link", link) as auxiliary:
            wait_until(lambda: auxiliary.poll() is not None or log.read_text().count("helped with") >= 3, 120)
            assert auxiliary.poll() is None, log.read_text()
            shown = json.loads(run_command("status", link, "--json").stdout)
            auxiliary.send_signal(signal.SIGTERM)
            assert auxiliary.wait(60) == 0, log.read_text()
        after = len(metrics(run_dir, "trainer-1"))
        wait_until(lambda: up.poll() is not None or len(metrics(run_dir, "trainer-1")) >= after + 3, 120)
        assert up.poll() is None, up_log.read_text()
        up.send_signal(signal.SIGINT)
        assert up.wait(60) == 0, up_log.read_text()
    record = next(peer for peer in shown["peers"] if peer["name"] == "helper")
    assert (record["role"], record["state"]) == ("auxiliary", "lending")
    assert record["note"].startswith("helped with")
    summary = json.loads((tmp_path / "helper" / "summary.json").read_text())
    assert summary["rounds_helped"] >= 3
    assert summary["bytes_sent"] > 0
    assert summary["exit_reason"] == "signal"
    digests = [{m["round"]: m["digest"] for m in metrics(run_dir, f"trainer-{n}") if m["members"] == 3} for n in (1, 2)]
    common = digests[0].keys() & digests[1].keys()
    assert common
    assert all(digests[0][number] == digests[1][number] for number in common)
