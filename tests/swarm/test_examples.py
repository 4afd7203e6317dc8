"""The examples run as a reader would run them: each alone, one with two peers and a restart."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes.daemons import ROOT
from tests.support.processes.swarmlet import nothing_left_behind

TIMEOUT_SECONDS = 200


def start(name: str, *arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.processes.run_example", f"examples/{name}.py", *map(str, arguments)],
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
        ("language_model", 10, 5.54),
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


@pytest.mark.slow
def test_five_hospitals_train_as_well_as_on_pooled_records() -> None:
    with nothing_left_behind():
        process = start("hospitals", "--seed", "1")
        output, _ = process.communicate(timeout=3 * TIMEOUT_SECONDS)
    assert process.returncode == 0, output
    together = set(re.findall(r"^site \d: \d+ patients, AUC ([\d.]+)$", output, flags=re.MULTILINE))
    (pooled,) = re.findall(r"all records pooled: ([\d.]+)$", output, flags=re.MULTILINE)
    assert len(together) == 1, "the sites hold the same model"
    assert float(together.pop()) > float(pooled) - 0.01


@pytest.mark.slow
def test_hospitals_stop_at_their_privacy_budgets_and_the_others_train_on() -> None:
    with nothing_left_behind():
        process = start("hospitals", "--seed", "1", "--epsilon", "8")
        output, _ = process.communicate(timeout=3 * TIMEOUT_SECONDS)
    assert process.returncode == 0, output
    found = re.findall(r"^site \d: \d+ patients, AUC ([\d.]+), ε ([\d.]+) of 8", output, flags=re.MULTILINE)
    assert len(found) == 5, output
    assert all(float(epsilon) <= 8 for _, epsilon in found)
    assert 1 <= output.count("the privacy budget is spent") < 5
    (pooled,) = re.findall(r"all records pooled: ([\d.]+)$", output, flags=re.MULTILINE)
    assert max(float(auc) for auc, _ in found) > float(pooled) - 0.02
