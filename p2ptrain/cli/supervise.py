"""Child processes that cannot outlive their owner.

`Supervisor` starts each peer in its own session, so that a terminal's Ctrl-C reaches only the owner. Linux kills a
child when the thread that started it ends (``PR_SET_PDEATHSIG``), even by SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.errors import P2PTrainError
from p2ptrain.tasks import Tasks, together

_PR_SET_PDEATHSIG = 1
_ERROR_PREFIX = "p2ptrain: error: "
_LOG_TAIL_BYTES = 16 * 1024


@dataclass
class Child:
    """One supervised process; ``log`` holds its standard output and error."""

    name: str
    log: Path
    process: asyncio.subprocess.Process

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative if a signal ended it."""
        return self.process.returncode

    @property
    def ending(self) -> str:
        """The end of the process for messages, such as ``ended with code 7`` or ``was ended by SIGKILL``."""
        code = self.exit_code or 0
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    def last_error(self) -> str:
        """Return the last error line of the log; else its last line unless a signal ended the process; else ``""``."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _LOG_TAIL_BYTES))
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        errors = [line.removeprefix(_ERROR_PREFIX) for line in lines if line.startswith(_ERROR_PREFIX)]
        killed = self.exit_code is not None and self.exit_code < 0
        return (errors or ([] if killed else lines) or [""])[-1].strip()

    def failure(self) -> P2PTrainError:
        """Return an error with the child's last error line and its exit code."""
        code, said = self.exit_code or 0, self.last_error()
        error = P2PTrainError(f"{self.name} {self.ending}{f': {said}' if said else ''} (log: {self.log})")
        error.exit_code = code if code > 0 else 1
        return error


class Supervisor:
    """An asynchronous context manager that starts child processes and kills them at its end, without restarts.

    Start children from the main thread, because the kernel kills them with the thread that started them.
    """

    def __init__(self) -> None:
        self.children: list[Child] = []

    async def start(self, name: str, command: Sequence[str], log: Path) -> Child:
        """Start a process in a new session, and append its output to ``log``."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with(os.getpid()),
            )
        child = Child(name, log, process)
        self.children.append(child)
        return child

    async def drain(self, children: Iterable[Child], timeout_seconds: float) -> None:
        """Send SIGTERM, wait for the children, and kill their process groups, at the deadline at the latest."""
        running = [child for child in children if child.exit_code is None]
        for child in running:
            with contextlib.suppress(ProcessLookupError):
                child.process.terminate()
        if running:
            async with Tasks() as tasks:
                waits = [tasks.call(child.process.wait(), f"wait-{child.name}") for child in running]
                await asyncio.wait(waits, timeout=timeout_seconds)
        for child in running:
            kill_group(child)

    async def wait_all(self, children: Iterable[Child]) -> None:
        await together("wait", (child.process.wait() for child in children))

    def kill_all(self) -> None:
        for child in self.children:
            kill_group(child)

    async def __aenter__(self) -> Supervisor:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.kill_all()
        await self.wait_all(self.children)


def kill_group(child: Child) -> None:
    """Send SIGKILL to a child's process group, which may be gone already."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, signal.SIGKILL)


def _die_with(parent: int) -> Callable[[], None]:
    # Load the library before the fork: afterwards only code that takes no lock is safe.
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # The parent died before prctl.

    return prepare
