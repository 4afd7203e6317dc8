"""The package of examples/plugin, installed by pip: it keeps p2ptrain's contracts, and a swarm trains with it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from p2ptrain.manifest import SIGNED_FILE
from tests.support.processes.daemons import ROOT
from tests.support.processes.files import write_text
from tests.support.processes.swarmlet import nothing_left_behind

FOLDER = ROOT / "examples" / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what pip installs; it builds in a copy, because it leaves files there."""
    directory = tmp_path_factory.mktemp("plugin")
    shutil.copytree(FOLDER, directory / "source")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(directory / "site")]
    run(None, "-m", "pip", "install", *options, str(directory / "source"))
    return directory / "site"


def run(site: Path | None, *command: str) -> str:
    """Run Python with p2ptrain and the installed package; return what it prints."""
    path = os.pathsep.join(map(str, filter(None, (ROOT, site))))
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=250,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_package_s_own_tests_pass(installed: Path) -> None:
    told = run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / "test_lab_plugin.py"))
    assert "6 passed" in told


def test_a_swarm_trains_with_its_family_codec_and_rule(installed: Path, tmp_path: Path) -> None:
    options = ["--manifest", str(FOLDER / "run.toml"), "--peers", "2", "--rounds", "12", "--run-dir", str(tmp_path)]
    options += ["--data", str(write_text(tmp_path / "text.txt")), "--set", "averaging.min_peers=2", "--no-monitor"]
    with nothing_left_behind():
        told = run(installed, "-m", "p2ptrain", "up", *options, "--device", "cpu", "--threads", "1")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["heldout_loss_after"] < 0.5 * summary["heldout_loss_before"]
    assert "all equal" in told
    assert "checkpoint export" not in told, "transformers has no such model"
    assert "generate LINK" not in told, "it cannot be served"
    run(installed, "-m", "p2ptrain", "checkpoint", "export", str(tmp_path / "trainer-1"), str(tmp_path / "model"))
    assert "model.load_state_dict(load_file('model.safetensors')" in (tmp_path / "model" / "README.md").read_text()
    assert "blocks.0.weight" in load_file(tmp_path / "model" / "model.safetensors")
    assert b"lab-plugin==1.0" in next(tmp_path.rglob(SIGNED_FILE)).read_bytes()
