"""SIGTERM while a round, or a batch, does not end: the last committed state is on disk, and the process is gone."""

import contextlib
import json
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from p2ptrain.cli.manifests import LINK_FILE
from p2ptrain.pipeline.checkpoints.saving import stage_folder
from p2ptrain.training.checkpoints.files import LoadedCheckpoint, load_newest_valid, verify_checkpoint
from tests.support.processes.daemons import wait_until
from tests.support.processes.files import QUICK, TINY, last_round, write_manifest, write_role, write_text
from tests.support.processes.preloaded import SERVER, STUCK
from tests.support.processes.stuck import SAYS
from tests.support.processes.swarmlet import background_command, nothing_left_behind
from tests.support.processes.tellers import PATIENCE_SECONDS

DRAIN_SECONDS = 9.0


class Trainers:
    """Trainers of one tiny swarm that save nothing until they leave."""

    def __init__(self, directory: Path, **sections: Any) -> None:
        text = write_text(directory / "text.txt", 500)
        self.directory = directory
        usual: dict[str, Any] = {
            "model": {**TINY, "hidden": 64, "intermediate": 128},
            "training": {"every": 4, "warmup_steps": 4},
            "averaging": {"grace_seconds": 60.0, "matchmaking_seconds": 300.0, "round_seconds": 300.0},
        }
        data = {"source": f"path:{text}"}
        self.manifest = write_manifest(directory / "manifest", name="draining", data=data, **{**usual, **sections})

    def role(self, name: str, link: str = "", *, stage: int = -1) -> Path:
        """Write a role file; the first trainer starts the swarm, others join by its link."""
        where = {"link": link} if link else {"manifest": str(self.directory / "manifest")}
        return write_role(
            self.directory / f"{name}.toml", "trainer" if stage < 0 else "both", **where, drain_seconds=DRAIN_SECONDS,
            checkpoints={"every_rounds": 0}, pipeline={"stage": stage},
        )  # fmt: skip

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def rounds(self, name: str) -> int:
        return max(0, last_round(self.directory / name))

    def link(self, name: str) -> str:
        path = self.directory / name / LINK_FILE
        self.wait(name, path.exists)
        return path.read_text().strip()

    def wait(self, name: str, condition: Callable[[], bool]) -> None:
        try:
            wait_until(condition, PATIENCE_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.log(name).read_text()[-2000:]}") from error

    def saved(self, name: str) -> LoadedCheckpoint:
        """Its newest checkpoint, every byte of which is verified."""
        found = load_newest_valid(self.directory / name / "checkpoints", self.manifest.digest)
        assert found is not None, self.log(name).read_text()[-2000:]
        return found


@pytest.fixture
def trainers(tmp_path: Path) -> Trainers:
    return Trainers(tmp_path)


@contextlib.contextmanager
def stuck_trainer(trainers: Trainers, link: str = "", *, stage: int = -1) -> Iterator[subprocess.Popen[Any]]:
    log, role = trainers.log("stuck"), trainers.role("stuck", link, stage=stage)
    with nothing_left_behind(), log.open("ab") as output:
        process = SERVER.fork_silent(STUCK, ["peer", str(role)], output, output)
        try:
            trainers.wait("stuck", lambda: SAYS in log.read_text())
            yield process
        finally:
            process.kill()
            process.wait()


def test_a_round_that_waits_for_a_stopped_peer_is_given_up_and_the_state_is_saved(trainers: Trainers) -> None:
    with (
        nothing_left_behind(),
        background_command(trainers.log("a"), "peer", trainers.role("a")) as a,
        background_command(trainers.log("b"), "peer", trainers.role("b", trainers.link("a"))) as b,
    ):
        trainers.wait("b", lambda: min(trainers.rounds("a"), trainers.rounds("b")) >= 3)
        stopped = [psutil.Process(b.pid), *psutil.Process(b.pid).children(recursive=True)]
        for process in stopped:
            process.suspend()
        a.send_signal(signal.SIGTERM)
        assert a.wait(PATIENCE_SECONDS) == 0, trainers.log("a").read_text()[-2000:]
        for process in stopped:
            process.resume()
    saved = trainers.saved("a")
    assert saved.head.round >= trainers.rounds("a") >= 3
    assert "optimizer_state" in saved.extra


def test_a_batch_that_does_not_end_is_left_behind_and_the_shared_state_is_saved(trainers: Trainers) -> None:
    with stuck_trainer(trainers) as process:
        committed = trainers.rounds("stuck")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0, trainers.log("stuck").read_text()[-2000:]
    assert trainers.saved("stuck").head.round >= committed > 0
    log = trainers.log("stuck").read_text()
    assert "the training thread does not save: saved what the swarm shares in" in log
    assert "Traceback" not in log
    assert json.loads((trainers.directory / "stuck" / "summary.json").read_text())["exit_reason"] == "signal"


def test_a_drain_whose_checkpoint_does_not_fit_the_disk_says_so_and_exits_with_7(trainers: Trainers) -> None:
    with stuck_trainer(trainers) as process:
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (20_000, hard))
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 7, trainers.log("stuck").read_text()[-2000:]
    assert "p2ptrain: error: cannot save a checkpoint" in trainers.log("stuck").read_text()


def test_a_host_whose_device_is_stuck_saves_its_stage_and_ends(tmp_path: Path) -> None:
    trainers = Trainers(
        tmp_path,
        model={**TINY, "layers": 2, "hidden": 64, "intermediate": 128},
        training={"every": 1, "global_batch": 16, "local_batch": 4, "warmup_steps": 0},
        averaging=QUICK,
        pipeline={"stages": 2},
    )
    with (
        background_command(trainers.log("a"), "peer", trainers.role("a", stage=0)),
        stuck_trainer(trainers, trainers.link("a"), stage=1) as process,
    ):
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0, trainers.log("stuck").read_text()[-2000:]
    folder = trainers.directory / "stuck" / "checkpoints" / stage_folder(1)
    verify_checkpoint(max(folder.glob("0*")))
    assert "the device thread does not end" in trainers.log("stuck").read_text()
