"""Random faults for hours, in a real swarm and in simulations: what must go on, and what must not grow.

    python -m tests.support.processes.soak --hours 8 [--seed N]

Two real peers are never harmed. Three others are killed, stopped for a while and started again, one of them every half
second to two seconds. Meanwhile a process tries simulated schedules, each seed once. It prints a line a minute, and at
the end how much memory, open files, threads, asyncio tasks and processes grew per hour in the unharmed peers and their
daemons. The exit code is 1 if something grew without bound, if no round was committed for `LONGEST_GAP_SECONDS`, if
states differed, or if a schedule failed.
"""

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.processes.commands import ROOT
from tests.support.processes.swarmlet import Swarmlet, Worker, check_states, descendants
from tests.support.seeds import base_seed, changing_seeds

UNHARMED = ("a", "b")
HARMED = ("c", "d", "e")
LONGEST_GAP_SECONDS = 300.0
"""Between two committed rounds of an unharmed peer."""
FAULT_SECONDS = (0.5, 2.0)
STOP_SECONDS = (1.0, 30.0)
CENSUS_SECONDS = 20.0
SAMPLES = 200
LEAST_SAMPLE_SECONDS = 2.0
STEP_SECONDS = 0.2
ALLOWANCES = {"memory": 64.0, "files": 24.0, "threads": 8.0, "tasks": 48.0, "processes": 8.0}
"""By how much a median may rise between the quarters of a run; memory in MiB. What grows without bound exceeds any."""


@dataclass(frozen=True)
class Growth:
    """How one quantity went.

    ``per_hour`` is its slope, by least squares, without the first quarter: a peer that starts grows. ``before`` and
    ``after`` are its medians in the second and in the last quarter.
    """

    per_hour: float
    before: float
    after: float


def growth(times: Sequence[float], values: Sequence[float]) -> Growth:
    """Return how a quantity went, from at least 8 values at ascending seconds."""
    first = len(times) // 4
    steady, since = list(values[first:]), list(times[first:])
    slope = statistics.linear_regression(since, steady).slope
    return Growth(slope * 3600, statistics.median(values[first : 2 * first]), statistics.median(values[-first:]))


@dataclass
class Record:
    """What was measured, by quantity, and what failed."""

    times: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ALLOWANCES})
    problems: list[str] = field(default_factory=list)

    def add(self, at: float, **measured: float) -> None:
        self.times.append(at)
        for name, value in measured.items():
            self.values[name].append(value)

    def judge(self) -> list[str]:
        """Return a line for each quantity; note in `problems` what grew by more than its allowance."""
        if len(self.times) < 8:
            self.problems.append(f"{len(self.times)} samples are too few to see growth: run it longer")
            return []
        lines = []
        for name, values in self.values.items():
            found = growth(self.times, values)
            line = f"{name:10} {found.before:8.0f} -> {found.after:8.0f}  {found.per_hour:+9.1f} per hour"
            if found.after - found.before > ALLOWANCES[name]:
                self.problems.append(f"{name} grew from {found.before:.0f} to {found.after:.0f}")
            lines.append(line)
        return lines


class Chaos:
    """Harms peers of a real swarm at random, and follows the others."""

    def __init__(self, swarm: Swarmlet, seed: int) -> None:
        self.swarm = swarm
        self.random = random.Random(seed)
        self.record = Record()
        self.faults = 0
        self.commits = 0
        self._link = ""
        self._up: dict[str, Worker] = {}
        self._stopped: dict[str, float] = {}
        self._read: dict[str, int] = {}
        self._committed_at: dict[str, float] = {}

    def run(self, seconds: float) -> None:
        first = self.swarm.start(UNHARMED[0], step_seconds=STEP_SECONDS)
        self._link = first.link
        self._up[first.name] = first
        for name in (*UNHARMED[1:], *HARMED):
            self._start(name)
        for name in UNHARMED:
            self._up[name].wait_for_commit()
            self._committed_at[name] = time.monotonic()
        began = now = time.monotonic()
        sample_every = max(LEAST_SAMPLE_SECONDS, seconds / SAMPLES)
        sample_at, fault_at, tell_at = now + sample_every, now, now + 60
        while (now := time.monotonic()) < began + seconds and not self.record.problems:
            self._wake(now)
            self._follow(now)
            if now >= fault_at:
                self._harm(now)
                fault_at = now + self.random.uniform(*FAULT_SECONDS)
            if now >= sample_at:
                self._sample(now - began)
                sample_at = now + sample_every
            if now >= tell_at:
                self._tell(now - began)
                tell_at = now + 60
            time.sleep(0.05)
        self._wake(float("inf"))

    def _start(self, name: str) -> None:
        self._up[name] = self.swarm.start(name, link=self._link, step_seconds=STEP_SECONDS)

    def _harm(self, now: float) -> None:
        name = self.random.choice(HARMED)
        worker = self._up.get(name)
        self.faults += 1
        if worker is None:
            self._start(name)
        elif self.random.random() < 0.5 and name not in self._stopped:
            self._stopped[name] = now + self.random.uniform(*STOP_SECONDS)
            self._signal(worker, signal.SIGSTOP)
        else:
            self._stopped.pop(name, None)
            self._signal(worker, signal.SIGCONT)
            worker.kill()
            self._forget(worker)

    def _forget(self, worker: Worker) -> None:
        """Drop a worker that has ended, with all that it told: this process must not grow either."""
        del self._up[worker.name]
        self.swarm.workers.remove(worker)

    def _wake(self, now: float) -> None:
        for name in [name for name, until in self._stopped.items() if until <= now]:
            del self._stopped[name]
            self._signal(self._up[name], signal.SIGCONT)

    def _signal(self, worker: Worker, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            joined = any(event["event"] == "joined" for event in worker.events)
            worker.signal_all(number) if joined else worker.signal(number)

    def _follow(self, now: float) -> None:
        """Check what was told since the last time, then forget it."""
        for name in UNHARMED:
            worker = self._up[name]
            if worker.process.poll() is not None:
                self.record.problems.append(f"{name} ended: {worker.last_words()}")
                return
            new = worker.rounds(self._read.get(name, 0))
            self._read[name] = len(worker.events)
            if any(event["committed"] for event in new):
                self.commits += 1
                self._committed_at[name] = now
            if now - self._committed_at[name] > LONGEST_GAP_SECONDS:
                self.record.problems.append(f"{name} committed no round for {LONGEST_GAP_SECONDS:.0f} s")
        try:
            check_states(*(self._up[name] for name in UNHARMED))
        except AssertionError as error:
            self.record.problems.append(f"states differ: {error}")

    def _sample(self, at: float) -> None:
        totals = dict.fromkeys(ALLOWANCES, 0.0)
        for name in UNHARMED:
            worker = self._up[name]
            since = len(worker.events)
            worker.order("census")
            totals["tasks"] += worker.wait_for("census", since=since, timeout_seconds=CENSUS_SECONDS)["tasks"]
            for process in (psutil.Process(worker.process.pid), psutil.Process(worker.daemon)):
                totals["memory"] += process.memory_info().rss / (1 << 20)
                totals["files"] += process.num_fds()
                totals["threads"] += process.num_threads()
        totals["processes"] = len(descendants()) - 2 * (len(self._up) - len(UNHARMED))
        self.record.add(at, **totals)
        for name in UNHARMED:  # What was looked at is forgotten, but for what says who it is.
            worker = self._up[name]
            worker.events[:] = [event for event in worker.events if event["event"] == "joined"] + worker.events[-20:]
            self._read[name] = len(worker.events)

    def _tell(self, at: float) -> None:
        last = {name: values[-1] for name, values in self.record.values.items() if values}
        shown = ", ".join(f"{name} {value:.0f}" for name, value in last.items())
        sys.stdout.write(f"{at / 60:6.0f} min: {self.faults} faults, {self.commits} commits, {shown}\n")
        sys.stdout.flush()


@contextlib.contextmanager
def schedules(minutes: float, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    first = changing_seeds("soak", 1)[0]
    command = [sys.executable, "-m", "tests.support.sim.schedules", "--first", str(first), "--minutes", str(minutes)]
    with output.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def main() -> int:
    """Run it; the exit code says whether all that must hold has held."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.processes.soak", description=__doc__)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=base_seed(), help="of the real swarm's faults")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="p2ptrain-soak-") as folder:
        where = Path(folder)
        with schedules(60 * options.hours, where / "schedules.log") as simulating, Swarmlet(where) as swarm:
            chaos = Chaos(swarm, options.seed)
            chaos.run(3600 * options.hours)
            record = chaos.record
            sys.stdout.write(f"seed {options.seed}: {chaos.faults} faults, {chaos.commits} commits\n")
            sys.stdout.write("".join(f"{line}\n" for line in record.judge()))
            code = simulating.wait(600 + 3600 * options.hours)
        log = (where / "schedules.log").read_text()
        sys.stdout.write(log)
        if code:
            record.problems.append("simulated schedules failed: see above")
    for problem in record.problems:
        sys.stdout.write(f"FAILED: {problem}\n")
    return int(bool(record.problems))


if __name__ == "__main__":
    sys.exit(main())
