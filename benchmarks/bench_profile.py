"""Where the CPU time of p2ptrain's round goes: event loop, compute thread, daemon; from /proc, by thread.

Part of `benchmarks.bench_averaging`.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from benchmarks.findings import Section
from benchmarks.harness import Measured, process_trees
from benchmarks.swarms import P2PTrainSwarm, Setup

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
SETTLE_SECONDS = 0.2

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
    """What a thread of a peer's own process is for."""
    if thread == "MainThread":
        return "event loop"
    return "compute thread" if thread.startswith("compute-") else "other threads"


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


def profile(setup: Setup, rounds: int) -> Section:
    """CPU milliseconds of one peer in one round, averaged over all."""
    with P2PTrainSwarm(setup) as swarm:
        swarm.round()
        before, seconds = parts(swarm), []
        for _ in range(rounds):
            time.sleep(SETTLE_SECONDS)
            seconds.append(swarm.round().seconds)
        used = {key: value - before.get(key, 0.0) for key, value in parts(swarm).items()}
    section = Section(
        f"CPU time of a p2ptrain peer in a round, {setup.peers} x {setup.num_values / 1e6:g}M {setup.codec}; a round "
        f"takes {Measured(tuple(seconds))} s",
        ("part", "user (ms)", "system (ms)", "ms", "share"),
    )
    each = {key: 1000 * value / rounds / setup.peers for key, value in used.items()}
    total = sum(each.values())
    for part in ("event loop", "compute thread", "other threads", "daemon"):
        user, system = each.get((part, "user"), 0.0), each.get((part, "system"), 0.0)
        share = f"{(user + system) / total:.0%}"
        section.rows.append((part, f"{user:.0f}", f"{system:.0f}", f"{user + system:.0f}", share))
        section.results[part] = {"user_ms": user, "system_ms": system}
    section.rows.append(("all", "", "", f"{total:.0f}", ""))
    section.results["round_seconds"] = Measured(tuple(seconds)).to_json()
    return section
