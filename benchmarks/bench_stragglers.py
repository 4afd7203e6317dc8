"""What one slow or stopped peer of four costs the others, p2ptrain against hivemind.

A peer is slowed to a tenth by stopping and continuing all its processes (SIGSTOP, SIGCONT) ten times a second, as a
CPU quota does, and stopped for good by SIGSTOP once it knows its group. Counted is until the last of the others has its
result: for p2ptrain from before matchmaking, in which the peer is slow already; for hivemind from when the group has
been found at full speed. p2ptrain's grace period is its default; hivemind may wait as long for a peer's next chunk.
Part of `benchmarks.bench_averaging`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.findings import Finding, Section
from benchmarks.harness import Measured, process_trees, progress, session_processes
from benchmarks.swarms import AveragingSwarm, HivemindSwarm, P2PTrainSwarm, Setup

PEERS = 4
CODEC = "int8"
GRACE_SECONDS = 3.0
SPEED = 0.1
PERIOD_SECONDS = 0.1
SETTLE_SECONDS = 1.0
GOAL = 1.2


@dataclass(frozen=True)
class Taken:
    """One round beside a straggler.

    Attributes:
        seconds: Until the others had their result; infinite when one of them never had.
        note: What became of a round that failed for one of the others; else empty.
        share: Of the time that the straggler was let run; None when that is not known.
    """

    seconds: float
    note: str = ""
    share: float | None = None


@contextlib.contextmanager
def handles_of(swarm: AveragingSwarm, index: int) -> Iterator[list[int]]:
    """A handle of every process of one peer, daemons and forked ones included; they are continued at the end.

    Through a handle a signal reaches that process or none, and at once: looking a process up each time would take
    longer than the time that a slow peer may run.
    """
    pid = swarm.all[index].process.pid
    processes = {*process_trees([pid]), *session_processes([pid])}
    with contextlib.ExitStack() as opened:
        handles: list[int] = []
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                handles.append(os.pidfd_open(process.pid))
                opened.callback(os.close, handles[-1])
        try:
            yield handles
        finally:
            _signal(handles, signal.SIGCONT)


def _signal(handles: Sequence[int], number: signal.Signals) -> None:
    for handle in handles:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, number)


@contextlib.contextmanager
def slowed(handles: Sequence[int]) -> Iterator[list[float]]:
    """Let these processes run for a tenth of the time, while this context lasts; gives each turn's share, as it was."""
    over = threading.Event()
    shares: list[float] = []

    def drive() -> None:
        with contextlib.suppress(PermissionError):  # On a busy machine this thread would stop them too late.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -20)
        while not over.is_set():
            _signal(handles, signal.SIGSTOP)
            stopped_at = time.monotonic()
            over.wait(PERIOD_SECONDS * (1 - SPEED))
            continued_at = time.monotonic()
            _signal(handles, signal.SIGCONT)
            over.wait(PERIOD_SECONDS * SPEED)
            if not over.is_set():  # The last turn is cut short.
                now = time.monotonic()
                shares.append((now - continued_at) / (now - stopped_at))

    driver = threading.Thread(target=drive, name="duty-cycle", daemon=True)
    driver.start()
    try:
        yield shares
    finally:
        over.set()
        driver.join()


def _others(swarm: AveragingSwarm, victim: int, started: float) -> Taken:
    """Hear all peers but one."""
    answers = [swarm.outcome(index) for index in range(len(swarm.all)) if index != victim]
    failures = [answer["failed"] for answer in answers if "failed" in answer]
    if failures:
        return Taken(float("inf"), failures[0])
    return Taken(max(answer["finished"] for answer in answers) - started)


def normal_round(swarm: AveragingSwarm, victim: int) -> Taken:
    """With all peers at full speed."""
    started = swarm.go()
    taken = _others(swarm, victim, started)
    swarm.outcome(victim)
    return replace(taken, share=1.0)


def slow_round(swarm: AveragingSwarm, victim: int) -> Taken:
    """With one peer at a tenth of its speed."""
    with handles_of(swarm, victim) as handles, slowed(handles) as shares:
        started = swarm.go()
        taken = _others(swarm, victim, started)
    swarm.outcome(victim)
    return replace(taken, share=statistics.fmean(shares or [SPEED]))


def stopped_round(swarm: AveragingSwarm, victim: int) -> Taken:
    """With one peer that stops for good once its group stands."""
    with handles_of(swarm, victim) as handles:
        started = swarm.go()
        swarm.wait_until_standing(victim)
        _signal(handles, signal.SIGSTOP)
        return replace(_others(swarm, victim, started), share=0.0)


KINDS: dict[str, Callable[[AveragingSwarm, int], Taken]] = {
    "normal": normal_round,
    "slow": slow_round,
    "stopped": stopped_round,
}


def measure(make: Callable[[], AveragingSwarm], turns: int) -> dict[str, list[Taken]]:
    """Rounds of all kinds in turn. After a failure, and after a stopped peer, another swarm goes on."""
    found: dict[str, list[Taken]] = {kind: [] for kind in KINDS}
    for _ in range(turns):
        left = list(KINDS)
        while left:
            try:
                with make() as swarm:
                    _fresh(swarm)
                    normal_round(swarm, PEERS - 1)
                    while left:
                        time.sleep(SETTLE_SECONDS)
                        _fresh(swarm)
                        found[left[0]].append(KINDS[left[0]](swarm, PEERS - 1))
                        left.pop(0)
            except RuntimeError as error:
                found[left.pop(0)].append(Taken(float("inf"), str(error)))
    return found


def _fresh(swarm: AveragingSwarm) -> None:
    """Let no round suffer from the one before."""
    if isinstance(swarm, P2PTrainSwarm):
        swarm.anew()
    swarm.prepare()


def compare(num_values: int, turns: int, log: str | None, hivemind_python: str) -> Section:
    """Both contenders, one after the other; each is compared with itself at full speed."""
    setup = Setup(PEERS, num_values, CODEC, GRACE_SECONDS, log=log, hivemind_python=hivemind_python)
    section = Section(
        f"The others' round beside a straggler, {PEERS} x {num_values / 1e6:g}M {CODEC}",
        ("", "one peer is", "its speed", "others' round (s)", "worst (s)", "of normal + grace", "failed"),
        notes=[
            f"Slow: a peer's processes run {SPEED:.0%} of the time (SIGSTOP and SIGCONT every {PERIOD_SECONDS} s). "
            f"Grace: {GRACE_SECONDS:g} s. hivemind's matchmaking is not counted."
        ],
    )
    contenders: dict[str, Callable[[], AveragingSwarm]] = {
        "p2ptrain": lambda: P2PTrainSwarm(setup),
        "hivemind": lambda: HivemindSwarm(setup),
    }
    for name, make in contenders.items():
        progress(f"rounds beside stragglers, {name}")
        found = measure(make, turns)
        normal = _seconds(found["normal"]).median
        for kind, rounds in found.items():
            failures = [taken.note for taken in rounds if taken.note]
            seconds = _seconds(rounds)
            ratio = seconds.median / (normal + GRACE_SECONDS)
            shares = [taken.share for taken in rounds if taken.share is not None]
            speed = f"{statistics.fmean(shares):.2f}" if shares else ""
            section.rows.append(
                (name, kind, speed, f"{seconds.median:.2f}", f"{max(seconds.values):.2f}",
                 f"{ratio:.2f}" if kind != "normal" else "", f"{len(failures)} of {len(rounds)}")
            )  # fmt: skip
            section.results[f"{name} {kind}"] = {
                "seconds": [taken.seconds if not taken.note else None for taken in rounds],
                "speed": [taken.share for taken in rounds],
                "failures": failures,
            }
            if kind != "normal" and name == "p2ptrain":
                what = f"the others' round beside a {kind} peer"
                section.findings.append(Finding(what, ratio, "normal + grace", GOAL))
            section.notes += [f"{name}, {kind}: {failure}" for failure in sorted(set(failures))]
    return section


def _seconds(rounds: Sequence[Taken]) -> Measured:
    """Those of rounds that did not fail; infinite when all did."""
    return Measured(tuple(taken.seconds for taken in rounds if not taken.note) or (float("inf"),))
