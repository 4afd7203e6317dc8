"""Placement of hosts on stages: pure functions of directory records that return a choice and its reason.

The slowest stage limits a pipeline. So a newcomer goes where it raises the slowest stages most. Then one host at a time
moves from the stage that needs it least.

Placements compare by leximin: lexicographically, by the stages' rates from the slowest up. So raising one of two
equally slow stages is progress. Each move improves that order by a margin, so moves terminate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from p2ptrain.errors import ResourceError

MARGIN = 0.05
"""Relative gain that a move requires of the slower stage it changes, if the target has one host. It absorbs measurement
noise. Noise averages out over n hosts, so the required gain falls with the square root of n."""


@dataclass(frozen=True)
class StageNeed:
    """Resources that hosting a stage takes.

    Attributes:
        work: Forward and backward of a fixed amount of data, in any unit.
        memory: Bytes.
    """

    work: float
    memory: int = 0


@dataclass(frozen=True)
class Host:
    """A peer that hosts a stage.

    Attributes:
        stage: Its stage, or the target of its announced move.
        speed: Work per second.
        memory: Bytes available for a stage.
        stays: True if it cannot move now: it has just moved, is about to, or has promised to stay.
        leaves: The stage that it still hosts during an announced move.
    """

    peer: str
    stage: int
    speed: float
    memory: int = 1 << 62
    stays: bool = False
    leaves: int | None = None


@dataclass(frozen=True)
class Choice:
    """A newcomer's stage, and the reason."""

    stage: int
    reason: str


@dataclass(frozen=True)
class Move:
    """A host's move to another stage, and the reason."""

    peer: str
    source: int
    target: int
    reason: str


def rates(needs: Sequence[StageNeed], hosts: Sequence[Host]) -> list[float]:
    """Return each stage's rate, if its hosts do nothing else: their total speed over the stage's work."""
    found = [0.0] * len(needs)
    for host in hosts:
        found[host.stage] += host.speed / needs[host.stage].work
    return found


def choose(needs: Sequence[StageNeed], hosts: Sequence[Host], speed: float, memory: int) -> Choice:
    """Return the stage for a newcomer with this speed (work per second) and memory (bytes for a stage).

    Raises:
        ResourceError: No stage fits into ``memory``.
    """
    fitting = [stage for stage, need in enumerate(needs) if need.memory <= memory]
    if not fitting:
        least = min(range(len(needs)), key=lambda stage: needs[stage].memory)
        raise ResourceError(
            f"no stage fits into {memory / 1e9:.2f} GB: the smallest, stage {least}, takes "
            f"{needs[least].memory / 1e9:.2f} GB; raise --max-memory, or ask for a swarm with more stages"
        )
    now = rates(needs, hosts)
    stage = max(fitting, key=lambda each: (_with(now, each, speed / needs[each].work), -each))
    num_hosts = sum(host.stage == stage for host in hosts)
    if not num_hosts:
        return Choice(stage, "nobody hosts it")
    if now[stage] <= min(now):
        return Choice(stage, f"it is the slowest, with {_hosts(num_hosts)}")
    return Choice(stage, f"it is the slowest that fits into {memory / 1e9:.2f} GB, with {_hosts(num_hosts)}")


def best_move(needs: Sequence[StageNeed], hosts: Sequence[Host]) -> Move | None:
    """Return the move of one host that helps most; None if none gains by `MARGIN`.

    No stage loses its last host. Peers that know the same hosts find the same move.
    """
    now = rates(needs, hosts)
    counts = Counter(host.stage for host in hosts)
    best: tuple[list[float], Host, int] | None = None
    seen = set[tuple[int, float, int]]()
    for host in sorted(hosts, key=lambda each: (each.speed, each.peer)):  # Ties go to the slower host.
        likeness = (host.stage, host.speed, host.memory)
        if host.stays or counts[host.stage] < 2 or likeness in seen:
            continue
        seen.add(likeness)  # Equal hosts have equal moves.
        left = now[host.stage] - host.speed / needs[host.stage].work
        for target, need in enumerate(needs):
            if target == host.stage or need.memory > host.memory:
                continue
            slower, faster = now[target], now[target] + host.speed / need.work
            if min(left, faster) <= slower * (1 + MARGIN / math.sqrt(max(counts[target], 1))):
                continue
            after = list(now)
            after[host.stage], after[target] = left, faster
            ordered = sorted(after)
            if best is None or ordered > best[0]:
                best = (ordered, host, target)
    if best is None:
        return None
    ordered, host, target = best
    gain = "nobody hosts it" if not counts[target] else f"it limits the swarm, with {_hosts(counts[target])}"
    return Move(host.peer, host.stage, target, f"{gain}; stage {host.stage} keeps {_hosts(counts[host.stage] - 1)}")


def counted(hosts: Sequence[Host], before: Sequence[Host], peer: str) -> list[Host]:
    """Return the other hosts as they count for ``peer``, which decided on ``before`` and re-checks its announced move.

    If several hosts announce moves concurrently, the smallest id moves first. It ignores concurrent announcements of
    larger ids, and those hosts count its move as done. An announcement in ``before`` always counts, since that host may
    already move.
    """
    said = {(host.peer, host.leaves, host.stage) for host in before}
    return [
        replace(host, stage=host.leaves, leaves=None)
        if host.leaves is not None and host.peer > peer and (host.peer, host.leaves, host.stage) not in said
        else host
        for host in hosts
    ]


def _with(now: Sequence[float], stage: int, more: float) -> list[float]:
    """Return the stages' rates, slowest first, with ``more`` added to one of them."""
    return sorted(rate + more if each == stage else rate for each, rate in enumerate(now))


def _hosts(number: int) -> str:
    return f"{number} host{'s' if number != 1 else ''}"
