"""Placement of hosts on stages: pure functions of the directory's records, each with its reason.

A pipeline is as fast as its slowest stage. So a newcomer goes where it lifts the slowest stages most, and one host at a
time moves there from where it is needed least. "Better" is meant lexicographically from the slowest stage up (leximin):
where two stages are equally slow, helping one of them is progress, although the slowest is as slow as before; and as
every move makes that order better by a margin, moves come to an end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from p2ptrain.errors import ResourceError

MARGIN = 0.05
"""By how much the slowest stage that a move changes has to gain if it has one host: speeds are measured, and
measurements differ. In a sum of n they even out, so n hosts have to gain less, by the root of n. (One more of 25 is a
gain of 4 %.)"""


@dataclass(frozen=True)
class StageNeed:
    """Needs of hosting a stage.

    Attributes:
        work: Of one microbatch, forward and backward, in any unit.
        memory: Bytes.
    """

    work: float
    memory: int = 0


@dataclass(frozen=True)
class Host:
    """A peer that hosts a stage.

    Attributes:
        peer: Its id.
        stage: Which.
        speed: Work per second that it can do.
        memory: Bytes that it has for a stage.
        stays: Whether it cannot move for now: it has just moved, or is about to, or has promised to stay.
        leaves: What it hosts until it is there, if it has said that it goes to ``stage``.
    """

    peer: str
    stage: int
    speed: float
    memory: int = 1 << 62
    stays: bool = False
    leaves: int | None = None


@dataclass(frozen=True)
class Choice:
    """The stage that a newcomer should host, and why."""

    stage: int
    reason: str


@dataclass(frozen=True)
class Move:
    """A host that should leave its stage for another one, and why."""

    peer: str
    source: int
    target: int
    reason: str


def rates(needs: Sequence[StageNeed], hosts: Sequence[Host]) -> list[float]:
    """Microbatches per second of each stage, if its hosts do nothing else."""
    found = [0.0] * len(needs)
    for host in hosts:
        found[host.stage] += host.speed / needs[host.stage].work
    return found


def choose(needs: Sequence[StageNeed], hosts: Sequence[Host], speed: float, memory: int) -> Choice:
    """Return the stage that a newcomer should host.

    Args:
        needs: Of each stage.
        hosts: Those that are there.
        speed: The newcomer's, in work per second.
        memory: What it has for a stage, in bytes.

    Raises:
        ResourceError: No stage fits; says what the smallest takes.
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


def best_move(needs: Sequence[StageNeed], hosts: Sequence[Host], margin: float = MARGIN) -> Move | None:
    """The move of one host that helps most; None where none helps by ``margin``.

    No stage loses its last host, and all peers that know the same hosts find the same move.

    Args:
        needs: Of each stage.
        hosts: Those that are there.
        margin: By how much the slowest of the stages that the move changes has to gain, relatively, if it has one
            host; see `MARGIN`.
    """
    now = rates(needs, hosts)
    counts = Counter(host.stage for host in hosts)
    best: tuple[list[float], Host, int] | None = None
    seen = set[tuple[int, float, int]]()
    for host in sorted(hosts, key=lambda each: (each.speed, each.peer)):  # Of two that help as much, the slower one.
        likeness = (host.stage, host.speed, host.memory)
        if host.stays or counts[host.stage] < 2 or likeness in seen:
            continue
        seen.add(likeness)  # Of equal hosts the first will do.
        left = now[host.stage] - host.speed / needs[host.stage].work
        for target, need in enumerate(needs):
            if target == host.stage or need.memory > host.memory:
                continue
            slower, faster = now[target], now[target] + host.speed / need.work
            if min(left, faster) <= slower * (1 + margin / math.sqrt(max(counts[target], 1))):
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
    """Hosts as they count for one that has said where it goes, and looks again before it does.

    Of several that decided without knowing of each other, the one with the smallest id goes: it does without what those
    with larger ids have said meanwhile, and they take what it said for done. Who had said so when it decided counts in
    any case: that one may be on its way.

    Args:
        hosts: The others, now.
        before: The others when it decided.
        peer: Its id.
    """
    said = {(host.peer, host.leaves, host.stage) for host in before}
    return [
        replace(host, stage=host.leaves, leaves=None)
        if host.leaves is not None and host.peer > peer and (host.peer, host.leaves, host.stage) not in said
        else host
        for host in hosts
    ]


def _with(now: Sequence[float], stage: int, more: float) -> list[float]:
    """The stages' rates, slowest first, if one of them had ``more``."""
    return sorted(rate + more if each == stage else rate for each, rate in enumerate(now))


def _hosts(number: int) -> str:
    return f"{number} host{'s' if number != 1 else ''}"
