"""Peers as processes: commands to their stdin, JSON lines from their stdout, and no process left behind."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import psutil

from benchmarks.harness import PeakMemory, end_processes, process_trees, session_processes, undisturbed

SHARED_MEMORY = Path("/dev/shm")
ENDED = "a process of the benchmark ended early; run with --log FILE to see why"


class Worker:
    """The parent's end of one process that runs a module of this package.

    Args:
        command: The interpreter, and what stands before it.
        module: What it runs.
        arguments: For the module.
        log: Where its error output goes.
        folder: For its temporary files.
    """

    def __init__(
        self, command: Sequence[str], module: str, arguments: Sequence[str], log: IO[bytes], folder: str
    ) -> None:
        self.process = subprocess.Popen(
            [*command, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=Path(__file__).resolve().parents[1],
            env={**os.environ, "HIVEMIND_LOGLEVEL": "WARNING", "TMPDIR": folder},
            start_new_session=True,  # so that what it forks is found even when it dies first
        )
        self._buffer = b""

    def tell(self, command: str) -> None:
        """Send one command line.

        Raises:
            RuntimeError: The process ended.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(command.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise RuntimeError(ENDED) from error

    def hear(self, timeout_seconds: float) -> dict[str, Any]:
        """The next answer.

        Raises:
            RuntimeError: The process ended, or did not answer in time.
        """
        deadline = time.monotonic() + timeout_seconds
        while not (line := self.line(deadline - time.monotonic())).startswith(b"{"):
            pass
        answer: dict[str, Any] = json.loads(line)
        return answer

    def line(self, timeout_seconds: float) -> bytes:
        """The next line that the process prints, without its end; raises as `hear`."""
        # The end of the process is watched too: what it forked holds the pipe open after it.
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while True:
                line, newline, rest = self._buffer.partition(b"\n")
                if newline:
                    self._buffer = rest
                    return line
                if selector.select(min(1.0, max(0.0, deadline - time.monotonic()))):
                    self._buffer += (chunk := os.read(self.process.stdout.fileno(), 65536))
                    if chunk:
                        continue
                if self.process.poll() is not None:
                    raise RuntimeError(ENDED)
                if time.monotonic() >= deadline:
                    raise RuntimeError(f"a process of the benchmark did not answer within {timeout_seconds:.0f} s")


class Workers:
    """Several `Worker` processes that end with this context, whatever happens, and all that they forked with them.

    Args:
        module: What each runs.
        log: Where their error output goes; None drops it.
    """

    def __init__(self, module: str, log: str | None = None) -> None:
        self.all: list[Worker] = []
        self._module = module
        self._log = open(log or os.devnull, "ab")  # noqa: SIM115 - closed in `__exit__`
        self._folder = tempfile.TemporaryDirectory()
        self._seen: set[psutil.Process] = set()

    @property
    def pids(self) -> list[int]:
        """Of the processes started here, not of what they started."""
        return [worker.process.pid for worker in self.all]

    def start(self, *arguments: str, command: Sequence[str] = (sys.executable,)) -> Worker:
        """Start one more; ``command`` is the interpreter, and what stands before it."""
        worker = Worker(command, self._module, arguments, self._log, self._folder.name)
        self.all.append(worker)
        return worker

    def processes(self) -> list[psutil.Process]:
        """All living processes of all workers."""
        found = process_trees(self.pids)
        self._seen.update(found)
        return found

    def tell_all(self, command: str) -> None:
        """Send one command line to each."""
        for worker in self.all:
            worker.tell(command)

    def hear_all(self, timeout_seconds: float) -> list[dict[str, Any]]:
        """One answer of each; see `Worker.hear`."""
        return [worker.hear(timeout_seconds) for worker in self.all]

    def begin(self) -> None:
        """Called on entry: start the workers that there are from the beginning, and wait until they are ready."""

    def __enter__(self) -> Self:
        try:
            self.begin()
            self.processes()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with undisturbed():
            self.processes()
            ended = {*self._seen, *session_processes(self.pids)}
            end_processes([*ended])
            for process in ended:
                _remove_shared_tensors(process.pid)
            for worker in self.all:
                worker.process.wait()
                for pipe in (worker.process.stdin, worker.process.stdout):
                    if pipe is not None:
                        pipe.close()
            self._log.close()
            self._folder.cleanup()


def _remove_shared_tensors(pid: int) -> None:
    """Remove the files in which a process shared tensors: hivemind's are in memory for good when it is ended."""
    for path in SHARED_MEMORY.glob(f"torch_{pid}_*"):
        with contextlib.suppress(OSError):
            path.unlink()


@dataclass(frozen=True)
class RoundMemory:
    """PSS in bytes around one round; see `memory_of_round`.

    Attributes:
        rest: All processes before it.
        peak: All processes, the most at one time.
        above_rest: Of the worker's processes that grew most: by how much.
    """

    rest: int
    peak: int
    above_rest: int


def memory_of_round(workers: Workers, one_round: Callable[[], object]) -> RoundMemory:
    """Sample the memory of all processes before and during ``one_round``."""
    with PeakMemory(workers.pids, interval_seconds=0.01) as peak:
        one_round()
    grown = max(most - before for most, before in zip(peak.each, peak.rest, strict=True))
    return RoundMemory(sum(peak.rest), peak.bytes, grown)
