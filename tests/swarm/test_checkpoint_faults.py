"""A trainer's disk is full while it writes a checkpoint, and a trainer is killed in the middle of writing one."""

import contextlib
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2ptrain.training.checkpoints.files import SHARED_FILE, load_newest_valid
from tests.support.processes.daemons import is_stopped, wait_until
from tests.support.processes.files import (
    QUICK,
    TINY,
    checkpoints,
    last_round,
    round_of,
    write_manifest,
    write_role,
    write_text,
)
from tests.support.processes.swarmlet import background_command, nothing_left_behind, run_command
from tests.support.processes.tellers import PATIENCE_SECONDS


class LoneTrainer:
    """A trainer that is a swarm by itself, as a person would start it; it saves a checkpoint of 8 MB every round."""

    def __init__(self, directory: Path) -> None:
        text = write_text(directory / "text.txt", 500)
        self.manifest = write_manifest(
            directory / "manifest",
            name="lone",
            model={**TINY, "layers": 2, "hidden": 128, "intermediate": 384},
            data={"source": f"path:{text}"},
            training={"every": 4, "warmup_steps": 4},
            averaging=QUICK,
        )
        self.role_file = write_role(
            directory / "lone.toml",
            "trainer",
            manifest=str(directory / "manifest"),
            checkpoints={"every_rounds": 1, "keep_last": 3},
        )
        self.log = directory / "lone.log"
        self.run_dir = directory / "lone"
        self.folder = self.run_dir / "checkpoints"

    @contextlib.contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        with nothing_left_behind(), background_command(self.log, "peer", self.role_file) as process:
            yield process

    def unfinished(self) -> list[Path]:
        """Tensor files that are being written, or were."""
        return list(self.folder.glob(f".unfinished-*/{SHARED_FILE}"))

    def wait_for(self, process: subprocess.Popen[bytes], what: str, condition: Callable[[], bool]) -> None:
        def holds() -> bool:
            assert process.poll() is None, self.log.read_text()
            return condition()

        try:
            wait_until(holds, PATIENCE_SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}: {self.log.read_text()[-1500:]}") from error


@pytest.mark.fault(24)
def test_a_disk_that_is_full_costs_a_checkpoint_and_neither_the_training_nor_the_checkpoints_before(
    tmp_path: Path,
) -> None:
    trainer = LoneTrainer(tmp_path)
    with trainer.running() as process:
        trainer.wait_for(process, "a first checkpoint", lambda: len(checkpoints(trainer.run_dir)) >= 2)
        # From here on a write of the tensors fails half-way, as it does when the space runs out.
        enough = (checkpoints(trainer.run_dir)[-1] / SHARED_FILE).stat().st_size // 2
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (enough, hard))
        trainer.wait_for(process, "a complaint", lambda: "cannot save" in trainer.log.read_text())
        before, reached = checkpoints(trainer.run_dir), last_round(trainer.run_dir)
        trainer.wait_for(process, "rounds without checkpoints", lambda: last_round(trainer.run_dir) >= reached + 3)
        assert checkpoints(trainer.run_dir) == before
        assert run_command("checkpoint", "verify", before[-1]).returncode == 0
        lines = [line for line in trainer.log.read_text().splitlines() if "cannot save" in line]
        expected = (
            rf"cannot save a checkpoint of \d+ MiB in {re.escape(str(trainer.folder))}: File too large; "
            "earlier checkpoints are intact: free some space or choose another directory"
        )
        assert all(re.search(expected + "$", line.rstrip()) for line in lines), lines
        assert "Traceback" not in trainer.log.read_text()
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        trainer.wait_for(process, "a checkpoint again", lambda: round_of(checkpoints(trainer.run_dir)[-1]) > reached)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0
    loaded = load_newest_valid(trainer.folder, trainer.manifest.digest)
    assert loaded is not None
    assert loaded.head.round > reached
    assert not trainer.unfinished()


@pytest.mark.fault(24)
def test_a_trainer_killed_in_the_middle_of_writing_a_checkpoint_resumes_from_the_one_before(tmp_path: Path) -> None:
    trainer = LoneTrainer(tmp_path)
    with trainer.running() as process:
        trainer.wait_for(process, "a first checkpoint", lambda: len(checkpoints(trainer.run_dir)) >= 2)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            assert time.monotonic() < deadline, "it was never seen writing"
            if trainer.unfinished():
                # It may have finished meanwhile: look again now that nothing moves.
                process.send_signal(signal.SIGSTOP)
                wait_until(lambda: is_stopped(process.pid))
                if trainer.unfinished():
                    break
                process.send_signal(signal.SIGCONT)
            time.sleep(0.001)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    torn, newest = trainer.unfinished(), checkpoints(trainer.run_dir)[-1]
    assert torn
    assert run_command("checkpoint", "verify", newest).returncode == 0
    with trainer.running() as process:
        trainer.wait_for(
            process, "newer checkpoints", lambda: round_of(checkpoints(trainer.run_dir)[-1]) >= round_of(newest) + 2
        )
        assert re.findall(r"restored round (\d+)", trainer.log.read_text()) == [str(round_of(newest))]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0
    assert run_command("checkpoint", "verify", checkpoints(trainer.run_dir)[-1]).returncode == 0
    assert not trainer.unfinished()
