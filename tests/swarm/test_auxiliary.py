"""An auxiliary from a role file helps three trainers: real processes, real daemons."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from tests.support.processes.daemons import wait_until
from tests.support.processes.swarmlet import (
    Swarmlet,
    background_command,
    nothing_left_behind,
    run_command,
    wait_for_agreement,
)
from tests.support.processes.tellers import PATIENCE_SECONDS

HIDDEN = 4000
"""Width of a model whose vector is worth sharing out: 40,000 values."""
ROLE = """
role = "auxiliary"
name = "helper"
run_dir = "helper"

[network]
listen = ["/ip4/127.0.0.1/tcp/0"]
"""


def test_an_auxiliary_helps_trainers_leaves_in_good_order_and_they_go_on(tmp_path: Path) -> None:
    role, log = tmp_path / "auxiliary.toml", tmp_path / "auxiliary.log"
    role.write_text(ROLE)
    with nothing_left_behind(), Swarmlet(tmp_path, averaging={"auxiliaries": 1}) as swarm:
        trainers = swarm.start_all("a", "b", "c", hidden=HIDDEN)
        link = trainers[0].link
        with background_command(log, "peer", role, "--link", link) as auxiliary:
            wait_until(
                lambda: auxiliary.poll() is not None or log.read_text().count("helped with") >= 3, 2 * PATIENCE_SECONDS
            )
            assert auxiliary.poll() is None, log.read_text()
            shown = json.loads(run_command("status", link, "--json").stdout)
            auxiliary.send_signal(signal.SIGTERM)
            assert auxiliary.wait(PATIENCE_SECONDS) == 0, log.read_text()
        newest = max(trainer.rounds()[-1]["round"] for trainer in trainers)
        wait_for_agreement(*trainers, after_round=newest + 2)
    record = next(peer for peer in shown["peers"] if peer["name"] == "helper")
    assert (record["role"], record["state"]) == ("auxiliary", "lending")
    assert record["note"].startswith("helped with")
    summary = json.loads((tmp_path / "helper" / "summary.json").read_text())
    assert summary["rounds_helped"] >= 3
    assert summary["bytes_sent"] > 0
    assert summary["exit_reason"] == "signal"
