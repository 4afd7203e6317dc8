"""Everybody dies at once: the swarm goes on from the newest checkpoints that are whole."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.daemons import free_port, wait_until
from tests.support.processes.swarmlet import background_command, nothing_left_behind, run_command
from tests.support.processes.tellers import PATIENCE_SECONDS

RUN = """
name = "tiny"
[model]
layers = 1
hidden = 32
heads = 2
kv_heads = 2
intermediate = 64
context = 32
[data]
source = "path:{text}"
[training]
every = 4
warmup_steps = 4
[averaging]
grace_seconds = 2.0
matchmaking_seconds = 10.0
round_seconds = 15.0
"""

TRAINER = """
role = "trainer"
name = "{name}"
run_dir = "{name}"
[network]
listen = ["/ip4/127.0.0.1/tcp/0"]
[resources]
device = "cpu"
threads = 1
[checkpoints]
every_rounds = 2
keep_last = 3
"""

NAMES = ("trainer-1", "trainer-2")


class Machines:
    """One bootstrap peer and two trainers, each a command as a person would start it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.organizer = directory / "organizer"
        self.port = free_port()
        text = directory / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog. " * 2000)
        assert run_command("init", self.organizer).returncode == 0
        (self.organizer / "run.toml").write_text(RUN.format(text=text))
        for name in NAMES:
            (directory / f"{name}.toml").write_text(TRAINER.format(name=name))

    @contextlib.contextmanager
    def running(self) -> Iterator[list[subprocess.Popen[bytes]]]:
        """All of them; the trainers come last in the list."""
        with contextlib.ExitStack() as stack:
            listen = f"/ip4/127.0.0.1/tcp/{self.port}"
            log = self.directory / "seed.log"
            seed = stack.enter_context(background_command(log, "seed", self.organizer, "--listen", listen))
            link_file = self.organizer / "bootstrap" / "link.txt"
            wait_until(link_file.exists, PATIENCE_SECONDS)
            link = link_file.read_text().strip()
            trainers = [
                stack.enter_context(background_command(self.log(name), "peer", self.role_file(name), "--link", link))
                for name in NAMES
            ]
            yield [seed, *trainers]

    def role_file(self, name: str) -> Path:
        return self.directory / f"{name}.toml"

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def rounds(self, name: str) -> list[dict[str, Any]]:
        """A trainer's committed rounds over all of its starts, oldest first."""
        path = self.directory / name / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        metrics = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [values for values in metrics if values.get("committed")]

    def checkpoints(self, name: str) -> list[Path]:
        """A trainer's checkpoints, oldest first."""
        return sorted((self.directory / name / "checkpoints").glob("[0-9]*-round-*"))


def round_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


@pytest.mark.fault(11)
def test_all_are_killed_and_training_goes_on_from_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    with nothing_left_behind(), machines.running() as processes:

        def trained() -> bool:
            assert all(process.poll() is None for process in processes), machines.log(NAMES[0]).read_text()
            together = [[r for r in machines.rounds(name) if r["members"] == 2] for name in NAMES]
            return all(len(rounds) >= 12 for rounds in together)

        wait_until(trained, 2 * PATIENCE_SECONDS)
        for process in processes:
            process.send_signal(signal.SIGKILL)
        for process in processes:
            assert process.wait() == -signal.SIGKILL
    before = {name: machines.rounds(name) for name in NAMES}
    saved = {name: machines.checkpoints(name) for name in NAMES}
    torn = saved[NAMES[1]][-1] / "shared.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1000])
    (torn.parent.parent / ".unfinished-999999-round-9").mkdir()
    best = round_of(saved[NAMES[0]][-1])

    with nothing_left_behind(), machines.running() as processes:

        def goes_on() -> bool:
            assert all(process.poll() is None for process in processes), machines.log(NAMES[0]).read_text()
            return all(len(machines.rounds(name)) >= len(before[name]) + 4 for name in NAMES)

        wait_until(goes_on, 2 * PATIENCE_SECONDS)
        for process in processes[1:]:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(PATIENCE_SECONDS) for process in processes[1:]] == [0, 0]
    again = {name: machines.rounds(name)[len(before[name]) :] for name in NAMES}
    restored = {name: re.findall(r"restored round (\d+)", machines.log(name).read_text()) for name in NAMES}
    assert restored[NAMES[0]] == [str(best)]
    assert restored[NAMES[1]] == [str(round_of(saved[NAMES[1]][-2]))], "the torn checkpoint is passed over"
    assert again[NAMES[0]][0]["round"] > best
    assert before[NAMES[0]][0]["loss"] - before[NAMES[0]][-1]["loss"] > 0.5, "there was something to lose"
    for name in NAMES:
        # Whoever is up first goes on alone, from its own checkpoint.
        (began_at,) = map(int, restored[name])
        there = next((values for values in before[name] if values["round"] >= began_at), before[name][-1])
        assert again[name][0]["loss"] < there["loss"] + 0.3
        # When they have met, the lineage with more tokens has won, so no more is lost than since the newest checkpoint.
        met = [values for values in again[name] if values["members"] == 2]
        assert met[-1]["loss"] < before[NAMES[0]][-1]["loss"] + 0.3
    digests = [{r["round"]: r["digest"] for r in again[name] if r["members"] == 2} for name in NAMES]
    common = set(digests[0]) & set(digests[1])
    assert common
    assert all(digests[0][number] == digests[1][number] for number in common)
    assert run_command("checkpoint", "verify", machines.checkpoints(NAMES[1])[-1]).returncode == 0
