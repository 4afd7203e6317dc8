"""A newcomer has room for one state: what it downloads lies on disk, and is put in place from there."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.processes.commands import ROOT


def test_a_newcomer_takes_a_tenth_more_memory_than_its_state(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.sim.newcomer_memory", str(tmp_path)], cwd=ROOT, check=True, text=True,
        stdout=subprocess.PIPE, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    told = json.loads(done.stdout)
    assert told["state_bytes"] > 90e6
    assert 0 < told["extra_bytes"] <= 0.1 * told["state_bytes"]
