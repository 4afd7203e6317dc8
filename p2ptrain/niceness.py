"""Processor time for other programs.

Linux first shares the cores among sessions, and then by niceness within each (sched(7), "The autogroup feature"). So a
peer's niceness alone counts for nothing beside programs of other terminals: its session needs it, too.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from pathlib import Path

ATTEMPTS = 5
PAUSE_SECONDS = 0.1
"""The kernel accepts one change in this time, of any session."""


def be_nice(niceness: int) -> None:
    """Add to the niceness of this thread, and of all threads and processes that it starts, and to its session's.

    A session that began before this process, such as a terminal's, has its own back at exit.
    """
    if not niceness:
        return
    os.nice(niceness)
    before = _of_session(os.getpid())
    share_niceness(os.getpid())
    if before is not None and os.getsid(0) != os.getpid():
        atexit.register(_set_session, os.getpid(), before)


def share_niceness(process: int) -> None:
    """Give this process's niceness to the session of another one, if it has less; may sleep for `PAUSE_SECONDS`."""
    before, own = _of_session(process), os.nice(0)
    if before is not None and before < own:
        _set_session(process, own)


def _path(process: int) -> Path:
    return Path(f"/proc/{process}/autogroup")


def _of_session(process: int) -> int | None:
    """Return the niceness of a process's session; None where sessions have none."""
    with contextlib.suppress(OSError, ValueError):
        return int(_path(process).read_text().rpartition(" ")[2])
    return None


def _set_session(process: int, niceness: int) -> None:
    for _ in range(ATTEMPTS):
        try:
            _path(process).write_text(str(niceness))
        except BlockingIOError:
            time.sleep(PAUSE_SECONDS)
        except OSError:
            return  # The process ended, or may not.
        else:
            return
