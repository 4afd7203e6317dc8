"""Microbatch routes: interleaved weighted round robin over each stage's hosts, by measured throughput.

Each host has a virtual time, at which it completes its assigned work. The next microbatch goes to the host with the
least virtual time (SWARM parallelism, arXiv 2301.11913, section 3.2: stochastic wiring). So shares are proportional to
throughput, and fast hosts' turns are spread evenly among those of slow ones.

A host gets no more while it holds more than its share of the work in flight. Measurements lag: without this bound,
microbatches pile up at an overrated host, and the round waits for it.

A failed host leaves all routes at once. It returns with its next record.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

from p2ptrain.pipeline.messages import HopFailedError

MEASURE_WEIGHT = 0.1
"""Weight of the newest measurement in a host's throughput, as in SWARM's code."""
DEFAULT_THROUGHPUT = 1.0


class NoHostError(HopFailedError):
    """No host of a stage is left to call."""

    def __init__(self, stage: int, reason: str) -> None:
        super().__init__(f"stage {stage} has no host ({reason}): wait for one to join, or host it: p2ptrain join LINK")
        self.stage = stage


@dataclass(frozen=True)
class HostState:
    """A host, as its record describes it: expected work per second, 0 if unknown, and the record's sequence."""

    throughput: float
    sequence: int


@dataclass
class _Host:
    state: HostState
    virtual_time: float
    measured: float | None = None
    under_way: float = 0.0


class StageRouter:
    """Draws the hosts of one stage; ``random`` breaks ties."""

    def __init__(self, stage: int, random: Random) -> None:
        self.stage = stage
        self._random = random
        self._hosts: dict[str, _Host] = {}
        self._failed: dict[str, tuple[int, str]] = {}
        """Failed hosts: the sequence of their last record, and the reason."""

    @property
    def hosts(self) -> Sequence[str]:
        """Hosts that may be drawn."""
        return tuple(self._hosts)

    def update(self, states: Mapping[str, HostState]) -> None:
        """Replace the stage's hosts by those in the directory."""
        self._hosts = {host: known for host, known in self._hosts.items() if host in states}
        self._failed = {host: failure for host, failure in self._failed.items() if host in states}
        for host, state in states.items():
            failed_at, _ = self._failed.get(host, (-1, ""))
            if state.sequence <= failed_at:
                continue
            self._failed.pop(host, None)
            known = self._hosts.get(host)
            if known is not None:
                known.state = state
            else:  # A new host does not catch up on past work.
                self._hosts[host] = _Host(state, min((each.virtual_time for each in self._hosts.values()), default=0.0))

    def failed(self, host: str, reason: str) -> None:
        """Exclude a host until it publishes a newer record."""
        known = self._hosts.pop(host, None)
        if known is not None:
            self._failed[host] = (known.state.sequence, reason)

    def has_failed(self, host: str) -> bool:
        return host in self._failed

    def measured(self, host: str, work: float, seconds: float) -> None:
        """Update a host's throughput with a measurement."""
        known = self._hosts.get(host)
        if known is None or not seconds > 0:
            return
        rate, before = work / seconds, known.measured
        known.measured = rate if before is None else before + MEASURE_WEIGHT * (rate - before)

    def throughput(self, host: str) -> float:
        """Return a host's work per second: measured, else reported, else the median of the others."""
        known = self._hosts[host]
        if known.measured is not None:
            return known.measured
        if known.state.throughput > 0:
            return known.state.throughput
        others = [each.measured or each.state.throughput for each in self._hosts.values()]
        return statistics.median([rate for rate in others if rate > 0] or [DEFAULT_THROUGHPUT])

    def draw(self, work: float, without: Collection[str] = ()) -> str:
        """Return the host for the next ``work``, but none of ``without``.

        Raises:
            NoHostError: No host is left.
        """
        candidates = [host for host in self._hosts if host not in without]
        if not candidates:
            reasons = [f"{host[-8:]} {reason}" for host, (_, reason) in self._failed.items()]
            raise NoHostError(self.stage, "; ".join(reasons[:3]) or "nobody says that it hosts it")
        rates = {host: self.throughput(host) for host in candidates}
        share = (sum(self._hosts[host].under_way for host in candidates) + work) / sum(rates.values())
        # Never empty but for rounding: together they hold less than their shares.
        behind = [host for host in candidates if self._hosts[host].under_way <= share * rates[host]] or candidates
        host = min(behind, key=lambda each: (self._hosts[each].virtual_time, self._random.random()))
        self._hosts[host].virtual_time += work / rates[host]
        return host

    def note_under_way(self, host: str, work: float) -> None:
        """Add ``work`` to a host's work in flight; a negative amount subtracts."""
        known = self._hosts.get(host)
        if known is not None:  # A host that left and returned begins at 0 again.
            known.under_way = max(0.0, known.under_way + work)


class Router:
    """Draws routes, a host for each stage; ``failovers`` counts failures of routed hosts."""

    def __init__(self, num_stages: int, random: Random) -> None:
        self.failovers = 0
        self.stages = [StageRouter(stage, random) for stage in range(num_stages)]

    def update(self, states: Sequence[Mapping[str, HostState]]) -> None:
        """Replace the hosts of all stages by those in the directory."""
        for stage, hosts in zip(self.stages, states, strict=True):
            stage.update(hosts)

    def failed(self, host: str, reason: str) -> None:
        """Exclude a host from all stages until it publishes a newer record."""
        self.failovers += any(host in stage.hosts for stage in self.stages)
        for stage in self.stages:
            stage.failed(host, reason)

    def draw(self, work: float) -> list[str]:
        """Return a route for a microbatch.

        Raises:
            NoHostError: A stage has no host; no other host is charged with ``work``.
        """
        for stage in self.stages:
            if not stage.hosts:
                stage.draw(work)
        return [stage.draw(work) for stage in self.stages]

    @contextmanager
    def sending(self, route: Sequence[str], work: float) -> Iterator[None]:
        """Count ``work`` as in flight on a route's hosts during the block."""
        for stage, host in zip(self.stages, route, strict=True):
            stage.note_under_way(host, work)
        try:
            yield
        finally:
            for stage, host in zip(self.stages, route, strict=True):
                stage.note_under_way(host, -work)
