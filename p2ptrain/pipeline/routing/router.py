"""Routes of microbatches: interleaved weighted round robin over each stage's hosts, on measured throughput.

Each host has a virtual time, at which it will be through with what was given to it; the next microbatch goes to the
host whose time is the least (SWARM parallelism, arXiv 2301.11913, section 3.2: a stochastic wiring of stages). Shares
are in proportion to throughput, and those of fast hosts are spread evenly between those of slow ones.

A host gets no more while it holds more than its share of what is under way: throughputs are measured with a delay, and
without that all microbatches gather at a host that is slower than believed, for which the round then waits.

A host that failed leaves all routes at once. It comes back with a record that it published after that.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

from p2ptrain.pipeline.messages import HopFailedError

MEASURE_WEIGHT = 0.1
"""Weight of the last measurement in a host's throughput (SWARM's code: an average over about ten)."""
DEFAULT_THROUGHPUT = 1.0


class NoHostError(HopFailedError):
    """A stage has no host to go to.

    Attributes:
        stage: Its number.
    """

    def __init__(self, stage: int, reason: str) -> None:
        super().__init__(f"stage {stage} has no host ({reason}): wait for one to join, or host it: p2ptrain join LINK")
        self.stage = stage


@dataclass(frozen=True)
class HostState:
    """A host, as its record describes it.

    Attributes:
        throughput: Work per second that it expects to do; 0 if it does not know.
        sequence: Grows with each of its records.
    """

    throughput: float
    sequence: int


@dataclass
class _Host:
    state: HostState
    virtual_time: float
    measured: float | None = None
    under_way: float = 0.0


class StageRouter:
    """Draws the hosts of one stage.

    Args:
        stage: Its number, for errors.
        random: Decides between equals.
    """

    def __init__(self, stage: int, random: Random) -> None:
        self.stage = stage
        self._random = random
        self._hosts: dict[str, _Host] = {}
        self._failed: dict[str, tuple[int, str]] = {}
        """Of hosts that failed: the sequence of the record that they had then, and how they failed."""

    @property
    def hosts(self) -> Sequence[str]:
        """The hosts that may be drawn."""
        return tuple(self._hosts)

    def update(self, states: Mapping[str, HostState]) -> None:
        """Take over the stage's hosts from the directory."""
        for host in [host for host in self._hosts if host not in states]:
            del self._hosts[host]
        for host in [host for host in self._failed if host not in states]:
            del self._failed[host]
        for host, state in states.items():
            failed_at, _ = self._failed.get(host, (-1, ""))
            if state.sequence <= failed_at:
                continue
            self._failed.pop(host, None)
            known = self._hosts.get(host)
            if known is not None:
                known.state = state
            else:  # It takes part from now on, and does not make up for the time before.
                self._hosts[host] = _Host(state, min((each.virtual_time for each in self._hosts.values()), default=0.0))

    def failed(self, host: str, reason: str) -> None:
        """Draw a host no more, until it has published a record after this."""
        known = self._hosts.pop(host, None)
        if known is not None:
            self._failed[host] = (known.state.sequence, reason)

    def has_failed(self, host: str) -> bool:
        """True if a host failed, and has published no record since."""
        return host in self._failed

    def measured(self, host: str, work: float, seconds: float) -> None:
        """Note how long a host took."""
        known = self._hosts.get(host)
        if known is None or not seconds > 0:
            return
        rate = work / seconds
        before = known.measured
        known.measured = rate if before is None else before + MEASURE_WEIGHT * (rate - before)

    def throughput(self, host: str) -> float:
        """Estimate a host's work per second: measured, told, or as much as the others' median."""
        known = self._hosts[host]
        if known.measured is not None:
            return known.measured
        if known.state.throughput > 0:
            return known.state.throughput
        others = [each.measured or each.state.throughput for each in self._hosts.values()]
        return statistics.median([rate for rate in others if rate > 0] or [DEFAULT_THROUGHPUT])

    def draw(self, work: float, without: Collection[str] = ()) -> str:
        """The host that the next ``work`` goes to.

        Args:
            work: How much it is.
            without: Hosts that are out of the question.

        Raises:
            NoHostError: There is no other.
        """
        candidates = [host for host in self._hosts if host not in without]
        if not candidates:
            reasons = [f"{host[-8:]} {reason}" for host, (_, reason) in self._failed.items()]
            raise NoHostError(self.stage, "; ".join(reasons[:3]) or "nobody says that it hosts it")
        rates = {host: self.throughput(host) for host in candidates}
        share = (sum(self._hosts[host].under_way for host in candidates) + work) / sum(rates.values())
        # There is always one: they hold less than that together.
        behind = [host for host in candidates if self._hosts[host].under_way <= share * rates[host]] or candidates
        host = min(behind, key=lambda each: (self._hosts[each].virtual_time, self._random.random()))
        self._hosts[host].virtual_time += work / rates[host]
        return host

    def note_under_way(self, host: str, work: float) -> None:
        """Note that so much more is under way through a host; less, if it is negative."""
        known = self._hosts.get(host)
        if known is not None:  # It may have been away meanwhile, and begun at 0 again.
            known.under_way = max(0.0, known.under_way + work)


class Router:
    """Draws routes: a host for each stage.

    Args:
        num_stages: How many stages there are.
        random: Decides between equals.

    Attributes:
        failovers: How often a host failed that was in the routes, so that others took its place.
    """

    def __init__(self, num_stages: int, random: Random) -> None:
        self.failovers = 0
        self.stages = [StageRouter(stage, random) for stage in range(num_stages)]

    def update(self, states: Sequence[Mapping[str, HostState]]) -> None:
        """Take over the hosts from the directory, stage by stage."""
        for stage, hosts in zip(self.stages, states, strict=True):
            stage.update(hosts)

    def failed(self, host: str, reason: str) -> None:
        """Remove a host from the routes of all stages."""
        self.failovers += any(host in stage.hosts for stage in self.stages)
        for stage in self.stages:
            stage.failed(host, reason)

    def draw(self, work: float) -> list[str]:
        """A route for a microbatch.

        Raises:
            NoHostError: A stage has no host; nothing is counted as given to the others.
        """
        for stage in self.stages:
            if not stage.hosts:
                stage.draw(work)
        return [stage.draw(work) for stage in self.stages]

    @contextmanager
    def sending(self, route: Sequence[str], work: float) -> Iterator[None]:
        """Count ``work`` as under way through the hosts of a route for the duration of the block."""
        for stage, host in zip(self.stages, route, strict=True):
            stage.note_under_way(host, work)
        try:
            yield
        finally:
            for stage, host in zip(self.stages, route, strict=True):
                stage.note_under_way(host, -work)
