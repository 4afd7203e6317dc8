"""Commands that compute nothing import nothing heavy: torch alone takes seconds of CPU time and 200 MB."""

import subprocess
import sys
from pathlib import Path

import pytest

from p2ptrain.cli.main import COMMANDS
from tests.support.processes.commands import HEAVY


def loaded(code: str, modules: set[str] = HEAVY) -> str:
    """Those of the modules that a process has imported after ``code``."""
    report = f"\nimport sys; print('loaded:', *sorted({modules!r} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code + report], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.rpartition("loaded:")[2].strip()


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)], ids=" ".join
)
def test_help_and_version_import_nothing_heavy(words: list[str]) -> None:
    call = f"try: code = main({words!r})\nexcept SystemExit as exit: code = exit.code\nassert not code"
    assert loaded(f"from p2ptrain.cli.main import main\n{call}", HEAVY | {"numpy", "hivemind"}) == ""


CALLS = {
    **{f"checkpoint {name}": f"assert main(['checkpoint', {name!r}, 'none'])" for name in ("ls", "export")},
    "init": "main(['init', FOLDER])",
    "init of a pipeline": "main(['init', FOLDER, '--set', 'training.every=1', '--set', 'pipeline.stages=2'])",
}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_a_command_that_computes_nothing_imports_nothing_heavy(tmp_path: Path, call: str) -> None:
    call = call.replace("FOLDER", repr(str(tmp_path / "run")))
    assert loaded(f"from p2ptrain.cli.main import main\n{call}") == ""


@pytest.mark.parametrize("module", ["p2ptrain.node.run", "p2ptrain.monitor.serve", "p2ptrain.cli.screen.swarm_view"])
def test_what_looks_on_or_serves_a_link_imports_nothing_heavy(module: str) -> None:
    assert loaded(f"import {module}") == ""
