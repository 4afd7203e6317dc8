"""Commands that compute nothing import nothing heavy: torch alone takes seconds of CPU time and 200 MB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from p2ptrain.cli.main import COMMANDS
from tests.support.processes.commands import HEAVY

REPORT = f"\nimport sys; print('loaded:', *sorted({HEAVY!r} & sys.modules.keys()))"


def loaded(code: str) -> str:
    """The heavy modules that a process has imported after ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", code + REPORT], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.rpartition("loaded:")[2].strip()


CALLS = {
    **{" ".join(words) or "nothing": f"assert not main({words!r})" for words in ([], ["--help"], ["--version"])},
    **{f"{name} --help": f"main([{name!r}, '--help'])" for name in COMMANDS},
    **{f"checkpoint {name}": f"assert main(['checkpoint', {name!r}, 'none'])" for name in ("ls", "export")},
    "init": "main(['init', FOLDER])",
    "init of a pipeline": "main(['init', FOLDER, '--set', 'training.every=1', '--set', 'pipeline.stages=2'])",
}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_a_command_that_computes_nothing_imports_nothing_heavy(tmp_path: Path, call: str) -> None:
    call = call.replace("FOLDER", repr(str(tmp_path / "run")))
    code = f"from p2ptrain.cli.main import main\ntry: {call}\nexcept SystemExit as exit: assert not exit.code"
    assert loaded(code) == ""


@pytest.mark.parametrize("module", ["p2ptrain.node.run", "p2ptrain.monitor.serve", "p2ptrain.cli.screen.swarm_view"])
def test_what_looks_on_or_serves_a_link_imports_nothing_heavy(module: str) -> None:
    assert loaded(f"import {module}") == ""
