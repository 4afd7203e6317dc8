"""Everybody dies at once: the swarm goes on from the newest checkpoints that are whole."""

import contextlib
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.daemons import free_port, refusing, wait_until
from tests.support.processes.files import (
    QUICK,
    TINY,
    checkpoints,
    committed,
    round_of,
    set_options,
    write_role,
    write_text,
)
from tests.support.processes.swarmlet import background_command, init, nothing_left_behind, run_command, seeding
from tests.support.processes.tellers import PATIENCE_SECONDS

NAMES = ("trainer-1", "trainer-2")


class Machines:
    """One bootstrap peer and two trainers, each a command as a person would start it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.organizer = directory / "organizer"
        self.port = free_port()
        text = write_text(directory / "text.txt")
        settings = set_options(
            name="tiny", model=TINY, data={"source": f"path:{text}"}, training={"every": 4, "warmup_steps": 4},
            averaging=QUICK,
        )  # fmt: skip
        init(self.organizer, *settings)
        for name in NAMES:
            write_role(directory / f"{name}.toml", "trainer", checkpoints={"every_rounds": 2, "keep_last": 3})

    @contextlib.contextmanager
    def running(self) -> Iterator[list[subprocess.Popen[bytes]]]:
        """All of them; the trainers come last in the list."""
        with contextlib.ExitStack() as stack:
            seed = stack.enter_context(seeding(self.organizer, f"/ip4/127.0.0.1/tcp/{self.port}"))
            commands = [("peer", self.directory / f"{name}.toml", "--link", seed.link) for name in NAMES]
            trainers = [
                stack.enter_context(background_command(self.log(name), *command))
                for name, command in zip(NAMES, commands, strict=True)
            ]
            yield [seed.process, *trainers]

    def check(self, processes: list[subprocess.Popen[bytes]]) -> None:
        """Check that all of them still run; otherwise, show what each that ended said."""
        logs = (self.organizer / "seed.log", *map(self.log, NAMES))
        together = zip(processes, logs, strict=True)
        ended = [f"status {p.returncode}: {log.read_text()}" for p, log in together if p.poll() is not None]
        assert not ended, "\n".join(ended)

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def rounds(self, name: str) -> list[dict[str, Any]]:
        return committed(self.directory / name)

    def checkpoints(self, name: str) -> list[Path]:
        return checkpoints(self.directory / name)


@pytest.mark.fault(11)
def test_all_are_killed_and_training_goes_on_from_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    with nothing_left_behind(), machines.running() as processes:

        def trained() -> bool:
            machines.check(processes)
            together = [[r for r in machines.rounds(name) if r["members"] == 2] for name in NAMES]
            return all(len(rounds) >= 12 for rounds in together)

        wait_until(trained, 2 * PATIENCE_SECONDS)
        for process in processes:
            process.send_signal(signal.SIGKILL)
        for process in processes:
            assert process.wait() == -signal.SIGKILL
    with refusing(machines.port):  # The seed's daemon ends a moment after the seed, and holds the port until then.
        pass
    before = {name: machines.rounds(name) for name in NAMES}
    saved = {name: machines.checkpoints(name) for name in NAMES}
    torn = saved[NAMES[1]][-1] / "shared.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1000])
    (torn.parent.parent / ".unfinished-999999-round-9").mkdir()
    best = round_of(saved[NAMES[0]][-1])

    with nothing_left_behind(), machines.running() as processes:

        def goes_on() -> bool:
            machines.check(processes)
            since = [machines.rounds(name)[len(before[name]) :] for name in NAMES]
            return all(len([r for r in rounds if r["members"] == 2]) >= 4 for rounds in since)

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
