"""A progress bar on a terminal for one long job at a time."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from p2ptrain.progress import Advance

PATIENCE_SECONDS = 0.3
"""Delay of the first drawing; a faster job shows no bar."""
REDRAW_SECONDS = 0.1


@contextlib.contextmanager
def bars(name: str, unit: str = "bytes") -> Iterator[Advance]:
    """Show a job on standard error if that is a terminal; implements `p2ptrain.progress.Progress` for one thread."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from p2ptrain.cli.screen.lines import job_line
    from p2ptrain.cli.screen.screen import Screen
    from p2ptrain.node.reports.jobs import Job

    with contextlib.ExitStack() as stack:
        began, next_at = time.monotonic(), time.monotonic() + (PATIENCE_SECONDS if unit else 0.0)
        screen: Screen | None = None

        def advance(done: int, total: int) -> None:
            nonlocal next_at, screen
            now = time.monotonic()
            if now < next_at or not Screen.can_draw(sys.stderr):
                return
            next_at = now + REDRAW_SECONDS
            screen = screen or stack.enter_context(Screen(sys.stderr, is_transient=True))
            screen.draw([job_line(Job(name, unit, done, total, now - began), screen.width)])

        advance(0, 0)
        yield advance
