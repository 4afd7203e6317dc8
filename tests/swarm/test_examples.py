"""The examples run as a reader would run them: loops alone, one with two peers and a restart, real work as a whole."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.processes.daemons import ROOT, wait_until
from tests.support.processes.swarmlet import nothing_left_behind
from tests.support.tools import unavailable, why_no_smollm2

TIMEOUT_SECONDS = 200


def start(name: str, *arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.processes.run_example", f"examples/loops/{name}.py",
         *map(str, arguments)],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def link_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"p2ptrain://[^']+", line):
            return found[0]
    raise AssertionError("it ended without a link")


def end_of(process: subprocess.Popen[str]) -> list[tuple[int, float, str]]:
    """Wait for its end: its rounds, their losses, and what follows."""
    output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, output
    found = re.findall(r"^round (\d+): loss ([\d.]+)(.*)$", output, flags=re.MULTILINE)
    return [(int(number), float(loss), rest) for number, loss, rest in found]


@pytest.mark.parametrize(
    ("name", "last", "guess"),
    [
        ("hf_trainer", 3, 5.54),
        ("accelerate_loop", 3, 5.54),
        ("lightning_module", 3, 5.54),
        ("plain_module", 20, 0.69),
    ],
)
def test_an_example_trains_alone(name: str, last: int, guess: float) -> None:
    with nothing_left_behind():
        process = start(name)
        link_of(process)
        rounds = end_of(process)
    assert rounds[-1][0] == last
    assert rounds[0][1] > 0.0, "it sees the loss"
    assert rounds[-1][1] < 0.97 * guess, "that is no longer the loss of a guess"


def test_two_loops_with_mixed_precision_train_together_and_go_on_later(tmp_path: Path) -> None:
    with nothing_left_behind():
        first = start("amp_loop", "--peers", "2", "--run-dir", tmp_path / "a")
        second = start("amp_loop", link_of(first), "--run-dir", tmp_path / "b")
        rounds = [*end_of(first), *end_of(second)]
        assert max(number for number, *_ in rounds) == 6
        assert all(rest == ", 2 peers" for *_, rest in rounds)
        assert list((tmp_path / "a" / "checkpoints").glob("*-round-6"))
        again = end_of(start("amp_loop", "--peers", "2", "--run-dir", tmp_path / "a"))
    assert again == [], "it has nothing left to do"


REAL_WORK = sorted(
    page.parent.name for page in ROOT.glob("examples/*/README.md") if (page.parent / "train.py").exists()
)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL_WORK)
def test_real_work_reaches_the_result_that_its_page_states(name: str) -> None:
    if name == "talk":
        unavailable(why_no_smollm2(), "smollm2")
    page = (ROOT / "examples" / name / "README.md").read_text(encoding="utf-8")
    (bound,) = re.findall(r"^Held to: `(.+)`\.?$", page, flags=re.MULTILINE)
    with nothing_left_behind():
        command = [sys.executable, "-m", f"examples.{name}.train", "--seed", "1", "--deadline", "500"]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=570)
    assert ended.returncode == 0, ended.stderr
    figures = {key: float(value) for key, value in re.findall(r"^(\w+) = ([\d.]+)$", ended.stdout, flags=re.MULTILINE)}
    assert eval(bound, {}, figures), figures


@pytest.mark.slow
def test_hospitals_with_masks_and_differential_privacy_come_within_1_percent_of_pooled_records() -> None:
    with nothing_left_behind():
        command = [sys.executable, "-m", "examples.hospitals.private", "--seed", "1", "--deadline", "500"]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=570)
    assert ended.returncode == 0, ended.stderr
    figures = {key: float(value) for key, value in re.findall(r"^(\w+) = ([\d.]+)$", ended.stdout, flags=re.MULTILINE)}
    assert figures["epsilon"] <= 8
    assert figures["swarm"] > figures["pooled"] - 0.01


def test_all_real_work_is_held_to_its_result() -> None:
    assert len(REAL_WORK) == len(list(ROOT.glob("examples/*/train.py"))) >= 5


def num_daemons(process: subprocess.Popen[str]) -> int:
    with contextlib.suppress(psutil.NoSuchProcess):
        return sum(child.name() == "p2pd" for child in psutil.Process(process.pid).children(recursive=True))
    return 0


@pytest.mark.slow
def test_ctrl_c_ends_all_sites_of_an_example() -> None:
    with nothing_left_behind():
        command = [sys.executable, "-m", "examples.hospitals.train"]
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        wait_until(lambda: num_daemons(process) == 5, TIMEOUT_SECONDS)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode != 0, output
    assert "swarm = " not in output
