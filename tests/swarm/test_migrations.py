"""The scripts of the guides to migrate: each trains, and each guide shows how the two scripts of a pair differ.

The scripts for hivemind and DDP run before the migration, too. Those for Flower, Petals and torchft do not, because
these are not installed.
"""

import difflib
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from p2ptrain.serving.sampling import Sampling
from tests.support.processes.daemons import ROOT
from tests.support.processes.files import LOOPBACK
from tests.support.processes.serving_hosts import Hosts, golden
from tests.support.processes.swarmlet import background_command, nothing_left_behind, seeding
from tests.swarm.test_adapters import pretrained

TIMEOUT_SECONDS = 200
FOLDER = ROOT / "examples" / "migrations"
PAIRS = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
OURS = ["-m", "tests.support.processes.run_example"]
GUESS = 0.69
"""The loss of a model that guesses one of two."""


def start(folder: Path, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command], cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def address_of(process: subprocess.Popen[str]) -> str:
    """Return what the first process tells others to join with."""
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"joins? with: python \w+\.py (?:\d )?(\S+)", line):
            return found[1]
    raise AssertionError("it ended without an address")


def losses(*processes: subprocess.Popen[str]) -> list[list[float]]:
    """Wait for the end of all; return the losses that each printed."""
    found = []
    for process in processes:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        assert process.returncode == 0, output
        found.append([float(loss) for loss in re.findall(r"^round \d+: loss ([\d.]+)$", output, flags=re.MULTILINE)])
    return found


def check_learned(found: list[float]) -> None:
    """Raise unless the mean of the last losses is far below a guess."""
    last = found[-4:]
    assert sum(last) / len(last) < 0.8 * GUESS, found


@pytest.mark.parametrize(("pair", "first", "second"), [("ddp", [], []), ("flower", ["0"], ["1"])])
def test_two_peers_train_with_the_script_after_the_migration(
    pair: str, first: list[str], second: list[str], tmp_path: Path
) -> None:
    script = str(FOLDER / pair / "after.py")
    with nothing_left_behind():
        one = start(tmp_path, *OURS, script, *first)
        other = start(tmp_path, *OURS, script, *second, address_of(one))
        for found in losses(one, other):
            check_learned(found)


@pytest.mark.parametrize("pair", ["hivemind", "torchft"])
def test_a_peer_trains_alone_with_the_script_after_the_migration(pair: str, tmp_path: Path) -> None:
    with nothing_left_behind():
        (found,) = losses(start(tmp_path, *OURS, str(FOLDER / pair / "after.py")))
    check_learned(found)


def test_petals_generation_goes_on_with_the_script_after_the_migration(tmp_path: Path) -> None:
    with nothing_left_behind(), ExitStack() as stack:
        hosts = Hosts(tmp_path / "hosts", stack)
        hosts.start_all(0, 1)
        process = start(tmp_path, *OURS, str(FOLDER / "petals_generate" / "after.py"), hosts.link)
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0, output
    assert bytes(golden(20, Sampling(temperature=0.0))).decode(errors="replace") in output


def test_petals_tuning_goes_on_with_the_script_after_the_migration(tmp_path: Path) -> None:
    swarm, weights = pretrained(tmp_path), str(tmp_path / "model")
    with nothing_left_behind(), ExitStack() as stack:
        link = stack.enter_context(seeding(swarm)).link
        for stage in ("0", "1"):
            host = ["join", link, "--yes", "--role", "stage", "--stage", stage, "--listen", LOOPBACK, "--threads", "1"]
            host += ["--weights", weights, "--run-dir", str(tmp_path / f"host{stage}")]
            stack.enter_context(background_command(tmp_path / f"host{stage}.log", *host))
        (found,) = losses(start(tmp_path, *OURS, str(FOLDER / "petals_tune" / "after.py"), weights, link))
    assert found[-1] < 0.9 * found[0]


def test_hivemind_trains_with_the_script_before_the_migration(tmp_path: Path) -> None:
    with nothing_left_behind():
        (found,) = losses(start(tmp_path, str(FOLDER / "hivemind" / "before.py")))
    check_learned(found)


def test_ddp_trains_with_the_script_before_the_migration(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with nothing_left_behind():
        (found,) = losses(start(tmp_path, *command, str(FOLDER / "ddp" / "before.py")))
    check_learned(found)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_guide_shows_how_the_scripts_differ(pair: str) -> None:
    before, after = ((FOLDER / pair / name).read_text().splitlines(keepends=True) for name in ("before.py", "after.py"))
    shown = "".join(difflib.unified_diff(before, after, "before.py", "after.py"))
    project = pair.partition("_")[0]
    page = (ROOT / "docs" / "how-to" / f"migrate-from-{project}.md").read_text()
    assert f"```diff\n{shown}```\n" in page, f"the guide should show:\n{shown}"
