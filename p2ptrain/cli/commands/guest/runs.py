"""Find the peers that run on this machine, and ask them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from p2ptrain.errors import ConfigError, P2PTrainError, UsageError

if TYPE_CHECKING:
    from p2ptrain.node.guest.control import Answer
    from p2ptrain.node.guest.totals import Totals

MAX_NAMED = 8
RUNS = Path("runs")


def add_run_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir", type=Path, nargs="?", metavar="RUN_DIR",
        help="the peer's run directory (default: that of the only peer that runs below ./runs)",
    )  # fmt: skip


def tell(run_dir: Path | None, do: Literal["pause", "resume", "leave", "finish"]) -> tuple[Path, Answer]:
    """Send a request to the peer of a run directory, or to the only one below ``runs``; return both.

    Raises:
        ConfigError, TemporaryError: As `p2ptrain.node.guest.control.ask`; no peer runs.
        UsageError: Several peers run.
    """
    from p2ptrain.node.guest.control import Request, ask

    run_dir = run_dir if run_dir is not None else _only_run()
    return run_dir, ask(run_dir, Request(do))


def _only_run() -> Path:
    from p2ptrain.node.guest.control import SOCKET_FILE

    folders = _folders_with(RUNS, SOCKET_FILE)
    found = [(folder, answer) for folder in folders if (answer := look(folder)) is not None]
    if not found:
        raise ConfigError(f"no peer runs below {RUNS.absolute()}: name its run directory")
    if len(found) > 1:
        named = ", ".join(f"{folder} ({answer.name})" for folder, answer in found[:MAX_NAMED])
        raise UsageError(f"several peers run here: name one of {named}{' …' if len(found) > MAX_NAMED else ''}")
    return found[0][0]


def look(run_dir: Path) -> Answer | None:
    """Return the state of the peer that runs in a directory; None if none answers."""
    from p2ptrain.node.guest.control import Request, ask

    try:
        return ask(run_dir, Request("look"))
    except P2PTrainError:
        return None


def given(run_dir: Path) -> list[tuple[Path, Totals, Answer | None]]:
    """Return what peers below a directory gave, and the states of those that run; raise `ConfigError` without one."""
    from p2ptrain.node.guest.control import SOCKET_FILE
    from p2ptrain.node.guest.totals import TOTALS_FILE, read_totals

    folders = _folders_with(run_dir, TOTALS_FILE, SOCKET_FILE)
    asked = [(folder, look(folder)) for folder in folders]  # A peer that is asked writes its newest totals.
    found = [(folder, totals, answer) for folder, answer in asked if (totals := read_totals(folder)) is not None]
    if not found:
        raise ConfigError(f"no peer has run in {run_dir.absolute()}: name the run directory of one")
    return found


def _folders_with(top: Path, *files: str) -> list[Path]:
    """Return the folders in ``top`` that have one of the files; run directories of `up` lie one folder deeper."""
    found = (path for file in files for form in (file, f"*/{file}", f"*/*/{file}") for path in top.glob(form))
    return sorted({path.parent for path in found})
