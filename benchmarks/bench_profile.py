"""Where the CPU time of p2ptrain's round goes: event loop, compute threads, daemon; from /proc, by thread.

Part of `benchmarks.bench_averaging`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bench_round import describe
from benchmarks.findings import Section
from benchmarks.harness import Measured, process_trees
from benchmarks.swarms import P2PTrainSwarm, Setup

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
SETTLE_SECONDS = 0.2
PARTS = ("event loop", "compute threads", "other threads", "daemon")

Parts = dict[tuple[str, str], float]
"""CPU seconds, by (part of a peer, ``user`` or ``system``)."""


def cpu_of_threads(pid: int) -> dict[int, tuple[float, float]]:
    """User and system CPU seconds of each thread of a process so far."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            # The name, in parentheses, may hold anything; user and system time are fields 14 and 15.
            fields = (task / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            found[int(task.name)] = int(fields[11]) / TICKS_PER_SECOND, int(fields[12]) / TICKS_PER_SECOND
    return found


def part_of(thread: str) -> str:
    """What a thread of a peer's own process is for; one of `PARTS`."""
    if thread == "MainThread":
        return "event loop"
    return "compute threads" if thread.startswith(("state-", "pool-", "device-")) else "other threads"


def parts(swarm: P2PTrainSwarm) -> Parts:
    """CPU seconds of all peers so far."""
    total: Parts = {}
    for worker, names in zip(swarm.all, swarm.threads(), strict=True):
        pid = worker.process.pid
        for process in process_trees([pid]):
            for thread, (user, system) in cpu_of_threads(process.pid).items():
                part = part_of(names.get(thread, "")) if process.pid == pid else "daemon"
                for kind, spent in (("user", user), ("system", system)):
                    total[part, kind] = total.get((part, kind), 0.0) + spent
    return total


def profile(setups: Sequence[Setup], rounds: int) -> Section:
    """CPU milliseconds of one peer in one round, averaged over all peers and rounds, for each setup."""
    section = Section(
        "CPU time of a p2ptrain peer in a round",
        ("peers x values, precision", "part", "user (ms)", "system (ms)", "share"),
    )
    for setup in setups:
        each, seconds = measure(setup, rounds)
        size, total = describe(setup), sum(each.values())
        section.results[size] = {"round_seconds": seconds.to_json()}
        for part in PARTS:
            user, system = each.get((part, "user"), 0.0), each.get((part, "system"), 0.0)
            section.rows.append((size, part, f"{user:.0f}", f"{system:.0f}", f"{(user + system) / total:.0%}"))
            section.results[size][part] = {"user_ms": user, "system_ms": system}
        section.notes.append(f"{size}: {total:.0f} ms of CPU; a round takes {seconds} s")
    return section


def measure(setup: Setup, rounds: int) -> tuple[Parts, Measured]:
    """CPU milliseconds of one peer in one round by part, and the rounds' seconds."""
    seconds: list[float] = []
    with P2PTrainSwarm(setup) as swarm:
        swarm.round()
        before = parts(swarm)
        for _ in range(rounds):
            time.sleep(SETTLE_SECONDS)
            seconds.append(swarm.round().seconds)
        after = parts(swarm)
    each = {key: 1000 * (value - before.get(key, 0.0)) / rounds / setup.peers for key, value in after.items()}
    return each, Measured(tuple(seconds))
