"""One averaging round on loopback, p2ptrain against hivemind at the same precision, as real processes.

Both average one fp32 vector a peer: p2ptrain in ``fp32`` against hivemind without compression, in ``int8`` against
its ``Uniform8BitQuantization``. Their rounds alternate in one run, so that ratios hold on a machine whose speed drifts.
A p2ptrain round is everything from the roster to the decoded mean: scatter, agreement on contributors, reduction,
gather, hashes, signatures, the certificate; a hivemind round begins once its group has been found.
Memory is measured with one contender's processes alone. Part of `benchmarks.bench_averaging`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.findings import Finding, Section, faster
from benchmarks.harness import Measured, progress, pss_bytes
from benchmarks.swarms import AveragingSwarm, Check, HivemindSwarm, P2PTrainSwarm, Round, Setup
from benchmarks.workers import RoundMemory, memory_of_round
from p2ptrain.codecs import get_codec

SETTLE_SECONDS = 0.5
"""Between rounds, so that what the contender before still does afterwards does not slow the next."""
ROUNDS_BEFORE_MEMORY = 4
"""What a peer keeps from earlier rounds has mostly gathered by then."""
CONTENDERS: tuple[type[P2PTrainSwarm] | type[HivemindSwarm], ...] = (P2PTrainSwarm, HivemindSwarm)
FASTER = {"fp32": 2.2, "int8": 4.5}
CPU_SHARE = {"fp32": 0.5, "int8": 0.3}
MEMORY_SHARE = 0.45
LARGEST_ERROR = 0.01
MEMORY_BEYOND_RESULT = 64_000_000
"""A round of up to 4 peers may take so many bytes and one encoded result above rest."""


@dataclass(frozen=True)
class Contender:
    """What one contender showed.

    Attributes:
        seconds: Of each timed round.
        cpu_seconds: Of each timed round: a peer's, with all its processes.
        memory: Around a round that is not the first: at rest a peer keeps what its rounds leave behind.
        begin_pss_bytes: Of all processes before the first round, the vectors included.
        first: How good the first mean was.
        versions: Of what the yardstick ran on.
    """

    seconds: Measured
    cpu_seconds: Measured
    memory: RoundMemory
    begin_pss_bytes: int
    first: Check
    versions: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        timed = {"seconds": self.seconds.to_json(), "cpu_seconds": self.cpu_seconds.to_json()}
        memory = {"begin": self.begin_pss_bytes, **asdict(self.memory)}
        return {**timed, "memory_bytes": memory, **asdict(self.first), "versions": self.versions}


def measure(setup: Setup, rounds: int) -> dict[str, Contender]:
    """Measure the memory of each contender alone, then ``rounds`` timed rounds of each in turn.

    Raises:
        RuntimeError: A peer failed or took too long.
    """
    first: dict[str, Check] = {}
    memory: dict[str, tuple[RoundMemory, int]] = {}
    for contender in CONTENDERS:
        with contender(setup) as alone:
            begin = pss_bytes(alone.processes())
            alone.round()
            first[alone.name] = alone.check()
            for _ in range(ROUNDS_BEFORE_MEMORY - 1):
                alone.round()
            time.sleep(SETTLE_SECONDS)
            memory[alone.name] = memory_of_round(alone, alone.round), begin
    timed: dict[str, list[Round]] = {contender.name: [] for contender in CONTENDERS}
    with contextlib.ExitStack() as running:
        swarms: list[AveragingSwarm] = [running.enter_context(contender(setup)) for contender in CONTENDERS]
        for turn in range(-1, rounds):
            for swarm in swarms:
                time.sleep(SETTLE_SECONDS)
                one = swarm.round()
                if turn >= 0:
                    timed[swarm.name].append(one)
    return {
        swarm.name: Contender(
            Measured(tuple(one.seconds for one in timed[swarm.name])),
            Measured(tuple(one.cpu_seconds / setup.peers for one in timed[swarm.name])),
            *memory[swarm.name],
            first[swarm.name],
            swarm.versions,
        )
        for swarm in swarms
    }


def compare(setups: Sequence[Setup], rounds: int) -> Section:
    """All sizes and precisions, one after another."""
    section = Section(
        "A round on loopback, without matchmaking",
        ("peers x values, precision", "", "round (s)", "CPU s a peer", "above rest (MB)",
         "PSS begin, peak (MB)", "error", "bit-identical"),
    )  # fmt: skip
    for setup in setups:
        size = describe(setup)
        progress(f"rounds of {size}")
        try:
            found = measure(setup, rounds)
        except RuntimeError as error:
            section.failures[size] = str(error)
            continue
        for name, one in found.items():
            section.rows.append(
                (size, name, one.seconds, one.cpu_seconds, f"{one.memory.above_rest / 1e6:.0f}",
                 f"{one.begin_pss_bytes / 1e6:.0f}, {one.memory.peak / 1e6:.0f}",
                 f"{100 * one.first.relative_error:.3f} %", "yes" if one.first.replicas_equal else "no")
            )  # fmt: skip
        section.findings += findings(setup, found["p2ptrain"], found["hivemind"])
        section.results[size] = {name: one.to_json() for name, one in found.items()}
        section.notes = [", ".join(f"{name} {version}" for name, version in found["hivemind"].versions.items())]
    return section


def findings(setup: Setup, ours: Contender, theirs: Contender) -> list[Finding]:
    """The ratios of one size, with their goals."""
    size, codec = describe(setup), setup.codec
    result = get_codec(codec).encoded_bytes(setup.num_values)
    found = [
        faster(f"{size}: round", ours.seconds.median, theirs.seconds.median, FASTER[codec]),
        Finding(f"{size}: CPU", ours.cpu_seconds.median / theirs.cpu_seconds.median, "hivemind", CPU_SHARE[codec]),
        Finding(f"{size}: PSS at the peak", ours.memory.peak / theirs.memory.peak, "hivemind", MEMORY_SHARE),
        Finding(f"{size}: error of the mean", ours.first.relative_error, "the mean", LARGEST_ERROR),
        Finding(f"{size}: bit-identical replicas", float(ours.first.replicas_equal), "all", 1.0, at_least=True),
    ]
    if setup.peers <= 4:
        allowed = result + MEMORY_BEYOND_RESULT
        note = f"{ours.memory.above_rest / 1e6:.0f} of {allowed / 1e6:.0f} MB"
        found.append(
            Finding(f"{size}: peak above rest", ours.memory.above_rest / allowed, "result + 64 MB", 1.0, note=note)
        )
    return found


def describe(setup: Setup) -> str:
    """Its size and precision, for a table."""
    millions = setup.num_values / 1e6
    return f"{setup.peers} x {millions:g}M {setup.codec}"
