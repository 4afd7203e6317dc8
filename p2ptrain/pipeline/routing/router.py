"""Microbatch routes: interleaved weighted round robin over each stage's hosts, by the throughput that callers measure.

Each host has a virtual time, at which it completes its assigned work. The next microbatch goes to the host with the
least virtual time (SWARM parallelism, arXiv 2301.11913, section 3.2: stochastic wiring). So shares are proportional to
throughput, and fast hosts' turns are spread evenly among those of slow ones.

No host's claim about itself counts. An unmeasured host begins at the median of the measured ones. A host's measure is
the mean time for a unit of work: in a mean of rates, as in SWARM's code, one reply from memory would outweigh ten.

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
"""Least weight of the newest measurement, as in SWARM's code; the first ones weigh more."""
MAX_SLOWER = 4.0
"""Bound on one measurement, relative to the known time: a wait for a round says little about a host."""
MIN_SECONDS = 1e-9


class NoHostError(HopFailedError):
    """No host of a stage is left to call."""

    def __init__(self, stage: int, reason: str) -> None:
        super().__init__(f"stage {stage} has no host ({reason}): wait for one to join, or host it: p2ptrain join LINK")
        self.stage = stage


@dataclass
class _Host:
    """A host with its record's sequence.

    Attributes:
        seconds: For a unit of work, by other clocks; 0 before the first of ``num_measured``.
        claimed: For a unit of work, as the host claims.
        under_way: Work in flight.
    """

    sequence: int
    virtual_time: float
    seconds: float = 0.0
    claimed: float = 0.0
    num_measured: int = 0
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

    def update(self, sequences: Mapping[str, int]) -> None:
        """Replace the stage's hosts by those in the directory, with their records' sequences."""
        self._hosts = {host: known for host, known in self._hosts.items() if host in sequences}
        self._failed = {host: failure for host, failure in self._failed.items() if host in sequences}
        for host, sequence in sequences.items():
            failed_at, _ = self._failed.get(host, (-1, ""))
            if sequence <= failed_at:
                continue
            self._failed.pop(host, None)
            known = self._hosts.get(host)
            if known is not None:
                known.sequence = sequence
            else:  # A new host does not catch up on past work.
                least = min((each.virtual_time for each in self._hosts.values()), default=0.0)
                self._hosts[host] = _Host(sequence, least)

    def failed(self, host: str, reason: str) -> None:
        """Exclude a host until it publishes a newer record."""
        known = self._hosts.pop(host, None)
        if known is not None:
            self._failed[host] = (known.sequence, reason)

    def has_failed(self, host: str) -> bool:
        return host in self._failed

    def measured(self, host: str, work: float, seconds: float, claimed: float) -> None:
        """Update a host's throughput with the time that it took for ``work``: by other clocks, and as it claims."""
        known = self._hosts.get(host)
        if known is None or not work > 0:
            return
        others = [each for each in self._hosts.values() if each.num_measured]
        for name, sample in (("seconds", seconds), ("claimed", claimed)):
            sample = max(sample / work, MIN_SECONDS)
            if others:
                typical = statistics.median(getattr(each, name) for each in others)
                before = getattr(known, name) if known.num_measured else typical
                weight = max(MEASURE_WEIGHT, 1.0 / (known.num_measured + 2))
                sample = before + weight * (min(sample, MAX_SLOWER * before) - before)
            setattr(known, name, sample)
        known.num_measured += 1

    def throughputs(self) -> dict[str, float]:
        """Return each host's work per second; for an unmeasured one, the median. It is 1 before any measurement.

        A measured time has the links' in it, and waits for rounds, so a host's claim is shorter. It counts as far as
        claims of the stage's other hosts are shorter than their measured times.
        """
        measured = [known for known in self._hosts.values() if known.num_measured]
        if not measured:
            return dict.fromkeys(self._hosts, 1.0)
        usual = max(1.0, statistics.median_low(known.seconds / known.claimed for known in measured))
        seconds = {host: max(known.claimed, known.seconds / usual) for host, known in self._hosts.items()}
        typical = statistics.median(seconds[host] for host, known in self._hosts.items() if known.num_measured)
        return {host: 1.0 / (seconds[host] or typical) for host in seconds}

    def draw(self, work: float, without: Collection[str] = ()) -> str:
        """Return the host for the next ``work``, but none of ``without``.

        Raises:
            NoHostError: No host is left.
        """
        candidates = [host for host in self._hosts if host not in without]
        if not candidates:
            reasons = [f"{host[-8:]} {reason}" for host, (_, reason) in self._failed.items()]
            raise NoHostError(self.stage, "; ".join(reasons[:3]) or "nobody says that it hosts it")
        rates = self.throughputs()
        share = sum(self._hosts[host].under_way for host in candidates) + work
        share /= sum(rates[host] for host in candidates)
        # Never empty but for rounding: together they hold less than their shares.
        behind = [host for host in candidates if self._hosts[host].under_way <= share * rates[host]] or candidates
        host = min(behind, key=lambda each: (self._hosts[each].virtual_time, self._random.random()))
        # Relative to the others, or the turns before the first measurement would weigh far more, or less.
        self._hosts[host].virtual_time += work * statistics.fmean(rates.values()) / rates[host]
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

    def update(self, sequences: Sequence[Mapping[str, int]]) -> None:
        """Replace the hosts of all stages by those in the directory."""
        for stage, hosts in zip(self.stages, sequences, strict=True):
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
