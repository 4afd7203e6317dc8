"""The cost of spot checks and of masks: rounds of one size with and without, in turn, as real processes on loopback.

There a round is nothing but work. Part of `benchmarks.bench_averaging`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.bench_round import SETTLE_SECONDS, describe
from benchmarks.findings import Finding, Section
from benchmarks.harness import Measured, paired, progress
from benchmarks.swarms import P2PTrainSwarm, Round, Setup

CHECKS = 4
CODEC = "int8"
GOAL = 1.3
MASKED_SECONDS, MASKED_BYTES = 1.5, 1.3


def compare(sizes: Sequence[tuple[int, int]], rounds: int, log: str | None) -> Section:
    """All sizes: (peers, values)."""
    section = Section(
        f"A round with {CHECKS} spot checks and without", ("peers x values, precision", "with", "without")
    )
    for peers, num_values in sizes:
        setups = [Setup(peers, num_values, CODEC, spot_checks=checks, log=log) for checks in (CHECKS, 0)]
        size = describe(setups[0])
        progress(f"spot checks of {size}")
        checked, plain = in_turn(setups, rounds)
        section.rows += [
            (f"{size}, seconds", _seconds(checked), _seconds(plain)),
            (f"{size}, CPU seconds", _cpu(checked), _cpu(plain)),
        ]
        time_ratio, cpu_ratio = paired(_seconds(checked), _seconds(plain)), paired(_cpu(checked), _cpu(plain))
        section.findings += [
            Finding(f"{size}: round with spot checks", time_ratio.median, "one without", GOAL),
            Finding(f"{size}: CPU with spot checks", cpu_ratio.median, "a round without", GOAL),
        ]
        section.results[size] = {"seconds": time_ratio.to_json(), "cpu": cpu_ratio.to_json()}
    return section


def compare_masks(sizes: Sequence[tuple[int, int]], rounds: int, log: str | None) -> Section:
    """Secure aggregation: all sizes, (peers, values) with at least three peers."""
    section = Section("A round with masked updates and without", ("peers x values, precision", "masked", "plain"))
    for peers, num_values in sizes:
        setups = [Setup(peers, num_values, "fp32", is_masked=masked, log=log) for masked in (True, False)]
        size = describe(setups[0])
        progress(f"masks of {size}")
        masked, plain = in_turn(setups, rounds)
        section.rows += [
            (f"{size}, seconds", _seconds(masked), _seconds(plain)),
            (f"{size}, CPU seconds", _cpu(masked), _cpu(plain)),
            (f"{size}, MB sent", _sent(masked), _sent(plain)),
        ]
        ratios = {
            "seconds": paired(_seconds(masked), _seconds(plain)),
            "cpu": paired(_cpu(masked), _cpu(plain)),
            "bytes": paired(_sent(masked), _sent(plain)),
        }
        section.findings += [
            Finding(f"{size}: round with masks", ratios["seconds"].median, "one without", MASKED_SECONDS),
            Finding(f"{size}: bytes with masks", ratios["bytes"].median, "without", MASKED_BYTES),
        ]
        section.results[size] = {name: ratio.to_json() for name, ratio in ratios.items()}
    return section


def in_turn(setups: Sequence[Setup], rounds: int) -> list[list[Round]]:
    """Rounds of two kinds of peers, in alternating order, after one of each."""
    found: list[list[Round]] = [[], []]
    with P2PTrainSwarm(setups[0]) as first, P2PTrainSwarm(setups[1]) as second:
        for number in range(-1, rounds):
            pair = [(first, found[0]), (second, found[1])]
            for swarm, taken in pair if number % 2 else pair[::-1]:
                time.sleep(SETTLE_SECONDS)
                one = swarm.round()
                if number >= 0:
                    taken.append(one)
    return found


def _seconds(rounds: Sequence[Round]) -> Measured:
    return Measured(tuple(one.seconds for one in rounds))


def _sent(rounds: Sequence[Round]) -> Measured:
    return Measured(tuple(one.sent_bytes / 1e6 for one in rounds))


def _cpu(rounds: Sequence[Round]) -> Measured:
    return Measured(tuple(one.cpu_seconds for one in rounds))
