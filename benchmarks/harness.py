"""What all benchmarks share: options, alternating runs, medians with spread, process-tree accounting, tables.

Times of shared machines drift, so contenders run in turn (A B C, A B C, ...) within one run, and reports give ratios of
medians. Run a benchmark as ``python -m benchmarks.bench_codecs`` from the repository's root.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

GRACE_SECONDS = 5.0
"""Time for a terminated process to end."""


def arguments(description: str | None, quick: str) -> argparse.ArgumentParser:
    """A command line with the options of every benchmark; ``quick`` says what ``--quick`` measures."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"see that it runs: {quick}")
    parser.add_argument("--json", metavar="FILE", help="also write all values here")
    return parser


@dataclass(frozen=True)
class Measured:
    """Repeated measurements of one thing, in one unit."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a fraction of the median."""
        if len(self.values) < 2 or not self.median:
            return 0.0
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return (high - low) / 2 / self.median

    def quantile(self, share: float) -> float:
        """The value that this share of the values does not exceed, interpolated."""
        ordered = sorted(self.values)
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    def __str__(self) -> str:
        """Median and spread, for a table."""
        return f"{self.median:.3f} ±{100 * self.spread:.0f} %"

    def to_json(self) -> dict[str, Any]:
        """Median, spread and all values."""
        return {"median": self.median, "spread": self.spread, "values": list(self.values)}


def thread_seconds(function: Callable[[], object]) -> Callable[[], float]:
    """Measure the CPU seconds (user and system) that ``function`` takes of the calling thread."""

    def measure() -> float:
        start = time.thread_time()
        function()
        return time.thread_time() - start

    return measure


def paired(ours: Measured, theirs: Measured) -> Measured:
    """Ratios turn by turn, since neighbours in time saw the same machine."""
    return Measured(tuple(one / other for one, other in zip(ours.values, theirs.values, strict=True)))


def alternate(cases: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, Measured]:
    """Run all ``cases`` in turn, ``repeats`` times over, after a turn that is not counted.

    Args:
        cases: By name, functions that return one measurement (such as those of `thread_seconds`).
    """
    values: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(-1, repeats):
        for name, case in cases.items():
            value = case()
            if turn >= 0:
                values[name].append(value)
    return {name: Measured(tuple(measured)) for name, measured in values.items()}


def machine() -> dict[str, Any]:
    """What a reader needs to judge the numbers; nothing that identifies the machine."""
    return {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "architecture": platform.machine(),
        "python": platform.python_version(),
    }


def format_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Plain text columns: the first flush left, numbers flush right."""
    cells = [list(headers), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    lines = [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in cells)
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def progress(what: str) -> None:
    """Say on the error output what is being measured now; the table comes when all of it has been."""
    sys.stderr.write(f"... {what}\n")
    sys.stderr.flush()


def process_trees(pids: Iterable[int]) -> list[psutil.Process]:
    """The living processes among ``pids`` and all their descendants."""
    found: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found += [process, *process.children(recursive=True)]
    return found


def session_processes(leaders: Iterable[int]) -> list[psutil.Process]:
    """The living processes of the sessions that ``leaders`` lead (or led), orphans included."""
    wanted, found = set(leaders), []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, PermissionError):
            if os.getsid(process.pid) in wanted:
                found.append(process)
    return found


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """User and system CPU seconds that ``processes`` have used so far."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def pss_bytes(processes: Iterable[psutil.Process]) -> int:
    """Proportional set size: resident memory, shared pages divided among those that share them."""
    total = 0
    for process in processes:
        with contextlib.suppress(OSError), open(f"/proc/{process.pid}/smaps_rollup", encoding="ascii") as lines:
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total


class PeakMemory:
    """Samples the PSS of process trees from a thread; ``with PeakMemory(pids) as peak: ...; peak.bytes``.

    Sampling makes the kernel walk page tables, so do not time what runs meanwhile. What the trees start meanwhile does
    not count.

    Attributes:
        bytes: The most that all trees had at one time.
        each: By tree: the most that it had.
        rest: By tree: what it had when sampling began.
    """

    def __init__(self, pids: Sequence[int], interval_seconds: float = 0.05) -> None:
        self.bytes = 0
        self.each = [0] * len(pids)
        self._trees = [process_trees([pid]) for pid in pids]
        self._interval_seconds = interval_seconds
        self.rest = [0] * len(pids)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peak-memory", daemon=True)

    def _run(self) -> None:
        while not self._done.wait(self._interval_seconds):
            self._sample()

    def _sample(self) -> None:
        now = [pss_bytes(tree) for tree in self._trees]
        self.each = [max(pair) for pair in zip(self.each, now, strict=True)]
        self.bytes = max(self.bytes, sum(now))

    def __enter__(self) -> PeakMemory:
        self._sample()
        self.rest = list(self.each)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def exit_on_signals() -> None:
    """Have SIGTERM and SIGHUP end this process as an exception does, so that contexts end what they started.

    Once is enough: while they do, more such signals are ignored.
    """
    numbers = (signal.SIGTERM, signal.SIGHUP)

    def leave(number: int, _: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    for each in numbers:
        signal.signal(each, leave)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Hold back the signals that end this process while something is cleaned up."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_processes(processes: Sequence[psutil.Process]) -> None:
    """Terminate exactly these processes (a reused pid is left alone), and kill those that do not go in time."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=GRACE_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=GRACE_SECONDS)
