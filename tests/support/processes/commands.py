"""Running the command line as people do: in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HEAVY = {"torch", "transformers", "bitsandbytes", "scipy", "peft", "datasets", "pandas", "hivemind.averaging"}
"""Modules that commands without a model must not import."""


def p2ptrain(*arguments: str, timeout_seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run ``p2ptrain`` with these arguments, with nothing to read from, and return what it did."""
    return subprocess.run(
        [sys.executable, "-m", "p2ptrain", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
    )


def printed(code: str, *arguments: object, timeout_seconds: float = 120.0) -> str:
    """Run Python code in a process of its own, and return what it prints; fail if it does."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_one_line_error(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """It ended with ``code`` and said why in one line of standard error, in which all the words occur."""
    assert done.returncode == code, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("p2ptrain: error: ")
    for word in words:
        assert word in lines[0]
