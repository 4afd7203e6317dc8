"""A scenario of the laboratory: what its TOML file says, and what a run of it is measured against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

ATTACKS = Path(__file__).parent / "attacks"
SCENARIOS = Path(__file__).parent / "scenarios"
OPPOSITES = {"kill": "restart", "stop": "resume", "cut": "mend", "partition": "heal"}
"""The fault that undoes a fault."""
HOSTILE = "stranger"
"""The start of the name of each attacker."""
KNOWN_ROUNDS = 3
"""Slow rounds after which an attacker must be known."""
SLOW = 1.5
"""A slow round takes longer than so many of the longest of the undisturbed run."""

Mode = Literal["simulated", "real"]
Nat = Literal["none", "port-restricted", "symmetric"]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]
Rate = Annotated[float, Meta(gt=0, le=100_000)]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a scenario's file."""


class Peers(Part, frozen=True):
    """Honest peers that are alike: ``t0``, ``t1``, … trainers and ``b0``, ``b1``, … bootstrap peers, counted in order.

    Attributes:
        step_seconds: Of a trainer's local step.
        nat: The kind of gateway in front of each; a simulation only takes them for unreachable.
    """

    count: Annotated[int, Meta(ge=1, le=64)]
    role: Literal["trainer", "bootstrap"] = "trainer"
    step_seconds: Annotated[float, Meta(gt=0, le=60)] = 0.5
    nat: Nat = "none"


class Link(Part, frozen=True):
    """Every peer's link: rate in each direction, one-way delay between two peers, and loss."""

    megabits: Rate = 100.0
    delay_ms: Annotated[float, Meta(ge=0, le=5_000)] = 40.0
    loss_percent: Annotated[float, Meta(ge=0, le=50)] = 0.0


class Fault(Part, frozen=True):
    """A fault of trainers, by name, at a time; it is undone ``seconds`` later, or not at all with 0."""

    kind: Literal["kill", "restart", "stop", "resume", "cut", "mend", "partition", "heal"]
    at: Seconds
    peers: tuple[str, ...] = ()
    seconds: Seconds = 0.0

    def __post_init__(self) -> None:
        if self.seconds and self.kind not in OPPOSITES:
            raise ValueError(f"nothing undoes {self.kind}")


class Attackers(Part, frozen=True):
    """Peers with keys of their own, which run one attack from a time on; ``options`` are the attack's own.

    Attributes:
        member: True for trainers that vote and may lead; in the undisturbed run they never attack.
    """

    attack: Annotated[str, Meta(pattern="^[a-z_]+$")]
    at: Seconds = 10.0
    count: Annotated[int, Meta(ge=1, le=16)] = 1
    member: bool = False
    options: dict[str, Any] = msgspec.field(default_factory=dict)


class Expect(Part, frozen=True):
    """The expectations of a scenario.

    Attributes:
        rounds_per_minute: Of the slowest trainer that no fault hits, at least.
        share: Of the undisturbed run's rounds a minute, at least, once the attackers are known.
        slow_rounds: Rounds that the attackers slow, at most; checked in scenarios without faults.
        goodput: Of the tokens of honest trainers that count in the undisturbed run, at least.
        memory_mb: Growth over the undisturbed run, for each honest peer, at most.
        one_lineage: True if all honest trainers must be on one lineage at the end, and contribute to it.
        foreign_rounds: Rounds that an honest peer applied and that no honest peer signed, at most.
    """

    rounds_per_minute: Annotated[float, Meta(ge=0)] = 1.0
    share: Annotated[float, Meta(ge=0, le=1)] = 0.8
    slow_rounds: Annotated[int, Meta(ge=0)] = KNOWN_ROUNDS
    goodput: Annotated[float, Meta(ge=0, le=1)] = 0.0
    memory_mb: Annotated[float, Meta(ge=0)] = 64.0
    one_lineage: bool = True
    foreign_rounds: Annotated[int, Meta(ge=0)] = 0


class Scenario(Part, frozen=True):
    """One experiment.

    Attributes:
        promise: What it shows, in one sentence.
        seconds: How long the swarm is watched, once all train.
        real: True if it also runs with real processes in network namespaces.
        manifest: Sections that override those of the tests' manifest.
        known_failure: Why it fails today; empty if it must pass. ``known_failure_in`` names the modes.
    """

    promise: Annotated[str, Meta(min_length=1, max_length=400)]
    peers: Annotated[tuple[Peers, ...], Meta(min_length=1)]
    seconds: Annotated[float, Meta(ge=10, le=86_400)] = 180.0
    real: bool = False
    link: Link = Link()
    manifest: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    attackers: tuple[Attackers, ...] = ()
    expect: Expect = Expect()
    known_failure: str = ""
    known_failure_in: tuple[Mode, ...] = ("simulated", "real")

    def __post_init__(self) -> None:
        names = {name for name, peers in self.named() if peers.role == "trainer"}
        if not names:
            raise ValueError("nobody trains")
        for fault in self.faults:
            if unknown := set(fault.peers) - names:
                raise ValueError(f"faults: no trainer is called {', '.join(sorted(unknown))}")
            if fault.at + fault.seconds > self.seconds:
                raise ValueError(f"faults: {fault.kind} at {fault.at:g} s is not over at the end")
        for group in self.attackers:
            if not (ATTACKS / f"{group.attack}.py").exists():
                raise ValueError(f"attackers: there is no tests/lab/attacks/{group.attack}.py")

    def named(self) -> Iterator[tuple[str, Peers]]:
        """Yield the name and the group of each honest peer, bootstrap peers first."""
        for role in ("bootstrap", "trainer"):
            groups = [group for group in self.peers if group.role == role]
            for number, group in enumerate(each for each in groups for _ in range(each.count)):
                yield f"{role[0]}{number}", group

    def hostile(self, *, members: bool | None = None) -> Iterator[tuple[str, Attackers]]:
        """Yield the name and the group of each attacker; only members, or only others, if that is given."""
        for number, group in enumerate(self.attackers):
            if members in (None, group.member):
                yield from ((f"{HOSTILE}{number}-{index}", group) for index in range(group.count))

    @property
    def unharmed(self) -> list[str]:
        """The trainers that no fault hits."""
        hit = {name for fault in self.faults for name in fault.peers if fault.kind != "partition"}
        return [name for name, group in self.named() if group.role == "trainer" and name not in hit]

    def timeline(self) -> list[tuple[float, str, tuple[str, ...]]]:
        """Return (time, fault, peers) in order, with what undoes the faults."""
        found: list[tuple[float, str, tuple[str, ...]]] = [(f.at, f.kind, f.peers) for f in self.faults]
        found += [(f.at + f.seconds, OPPOSITES[f.kind], f.peers) for f in self.faults if f.seconds]
        return sorted(found, key=lambda each: each[0])

    def is_known_to_fail(self, mode: Mode) -> bool:
        return bool(self.known_failure) and mode in self.known_failure_in


def read_scenario(path: Path) -> Scenario:
    """Read a scenario's file; raise `ValueError` that names file, field and bound."""
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Scenario)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from error


@dataclass
class Measured:
    """The measurements of one run.

    Attributes:
        ends: Seconds of the watched time at which the slowest trainer that no fault hits had committed each round.
        tokens: Of honest peers in the longest lineage, from the watched time.
        peak_mb: The process's peak of memory in a simulation; for real the largest growth of one peer.
        foreign_rounds: Rounds that an honest peer applied and no honest peer signed.
        stranger_rounds: Rounds with a stranger's contribution, which honest peers signed, too.
        lineages: Of the honest trainers at the end; 1 if all are on one.
        recovery: Seconds from the end until all honest trainers had committed on one lineage.
        problems: Broken invariants, and peers that ended.
    """

    seconds: float
    ends: list[float] = field(default_factory=list)
    tokens: int = 0
    peak_mb: float = 0.0
    foreign_rounds: int = 0
    stranger_rounds: int = 0
    lineages: int = 0
    recovery: float = 0.0
    problems: list[str] = field(default_factory=list)

    def rounds_per_minute(self, since: float = 0.0) -> float:
        """Return the mean from a time on."""
        return 60.0 * sum(end > since for end in self.ends) / (self.seconds - since)

    def rounds(self) -> list[tuple[float, float]]:
        """Return start and end of each round; the last one did not end in the watched time."""
        return list(pairwise([0.0, *self.ends, self.seconds]))

    @property
    def longest_round(self) -> float:
        return max(end - start for start, end in self.rounds())


@dataclass
class Verdict:
    """A run beside the undisturbed run of the same seed, and what of the expectations did not hold."""

    name: str
    mode: Mode
    seed: int
    scenario: Scenario
    run: Measured
    undisturbed: Measured
    violations: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        expect, run = self.scenario.expect, self.run
        if run.rounds_per_minute() < expect.rounds_per_minute:
            self._add(f"{run.rounds_per_minute():.1f} rounds a minute, not {expect.rounds_per_minute:g}")
        if self.scenario.attackers and not self.scenario.faults and len(self.slow) > expect.slow_rounds:
            self._add(f"{len(self.slow)} slow rounds, not {expect.slow_rounds}")
        if self.share < expect.share:
            self._add(f"{self.share:.0%} of the undisturbed rounds, not {expect.share:.0%}")
        if self.goodput < expect.goodput:
            self._add(f"{self.goodput:.0%} of the undisturbed tokens, not {expect.goodput:.0%}")
        if self.memory_mb > expect.memory_mb:
            self._add(f"{self.memory_mb:.0f} MB more memory for each peer, not {expect.memory_mb:g}")
        if expect.one_lineage and run.lineages != 1:
            self._add(f"{run.lineages} lineages at the end")
        if run.foreign_rounds > expect.foreign_rounds:
            self._add(f"{run.foreign_rounds} rounds applied that no honest peer signed")
        self.violations += run.problems

    def _add(self, violation: str) -> None:
        self.violations.append(violation)

    @property
    def attacked_at(self) -> float:
        return min((group.at for group in self.scenario.attackers), default=0.0)

    @property
    def slow(self) -> list[float]:
        """The ends of the rounds that took too long, from the first attack on."""
        longest = SLOW * self.undisturbed.longest_round
        return [end for start, end in self.run.rounds() if end > self.attacked_at and end - start > longest]

    @property
    def share(self) -> float:
        """Rounds a minute as a share of the undisturbed run's, once the attackers are known.

        Beside faults, nobody can tell what slowed a round: then all rounds count.
        """
        is_attack, undisturbed = self.scenario.attackers and not self.scenario.faults, self.undisturbed
        # Of a few rounds at the end, one more or less is much.
        known = [self.attacked_at, *(end for end in self.slow[:KNOWN_ROUNDS] if end <= 2 / 3 * self.run.seconds)][-1]
        known = known if is_attack else 0.0
        usual = undisturbed.rounds_per_minute()
        return self.run.rounds_per_minute(known) / usual if usual and known < self.run.seconds else 0.0

    @property
    def goodput(self) -> float:
        """Honest tokens that count, as a share of the undisturbed run's."""
        return self.run.tokens / self.undisturbed.tokens if self.undisturbed.tokens else 0.0

    @property
    def memory_mb(self) -> float:
        peers = sum(group.count for group in self.scenario.peers) if self.mode == "simulated" else 1
        return max(0.0, self.run.peak_mb - self.undisturbed.peak_mb) / peers

    @property
    def outcome(self) -> str:
        """``holds``, ``FAILS``, ``fails as known``, or ``PASSES UNEXPECTEDLY``."""
        if self.scenario.is_known_to_fail(self.mode):
            return "fails as known" if self.violations else "PASSES UNEXPECTEDLY"
        return "FAILS" if self.violations else "holds"

    @property
    def is_as_expected(self) -> bool:
        return self.outcome in ("holds", "fails as known")

    def __str__(self) -> str:
        run = self.run
        line = (
            f"{self.name:22} {self.mode:9} {self.outcome:19} {run.rounds_per_minute():5.1f} rounds/min"
            f" {self.share:4.0%}  {len(self.slow)} slow  +{self.memory_mb:.0f} MB  longest {run.longest_round:.0f} s"
            f"  goodput {self.goodput:.0%}  foreign {run.foreign_rounds}"
            f"  of strangers {run.stranger_rounds}"
        )
        known = [f"known: {self.scenario.known_failure}"] if self.outcome == "fails as known" else []
        return "\n    ".join([line, *known, *(violation[:300] for violation in self.violations)])
