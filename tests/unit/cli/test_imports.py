"""Commands that compute nothing import nothing heavy: torch alone takes seconds of CPU time and 200 MB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes.commands import HEAVY

REPORT = f"\nimport sys; print('loaded:', *sorted({HEAVY!r} & sys.modules.keys()))"


def loaded(code: str) -> str:
    """The heavy modules that a process has imported after ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", code + REPORT], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.rpartition("loaded:")[2].strip()


@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_an_overview_imports_nothing_heavy(words: list[str]) -> None:
    assert loaded(f"from p2ptrain.cli.main import main; main({words})") == ""


@pytest.mark.parametrize("command", ["up", "join", "peer", "status", "monitor", "seed", "doctor", "checkpoint"])
def test_a_command_s_help_imports_nothing_heavy(command: str) -> None:
    code = f"from p2ptrain.cli.main import main\ntry: main([{command!r}, '--help'])\nexcept SystemExit: pass"
    assert loaded(code) == ""


@pytest.mark.parametrize("words", [["ls", "none"], ["export", "none"]])
def test_a_mistake_about_checkpoints_imports_nothing_heavy(words: list[str]) -> None:
    assert loaded(f"from p2ptrain.cli.main import main; assert main(['checkpoint', *{words}])") == ""


@pytest.mark.parametrize("words", [[], ["--set", "training.every=1", "--set", "pipeline.stages=2"]])
def test_init_imports_nothing_heavy(tmp_path: Path, words: list[str]) -> None:
    assert loaded(f"from p2ptrain.cli.main import main; main(['init', {str(tmp_path / 'run')!r}, *{words}])") == ""


@pytest.mark.parametrize("module", ["p2ptrain.node.run", "p2ptrain.monitor.serve", "p2ptrain.cli.screen.swarm_view"])
def test_what_looks_on_or_serves_a_link_imports_nothing_heavy(module: str) -> None:
    assert loaded(f"import {module}") == ""
