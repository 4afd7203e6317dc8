"""What a peer that freezes costs the others, in each phase of a round: in that round, and in the next one.

Real processes on loopback. The last peer stops itself (SIGSTOP) as it enters the phase; its daemon lives on, takes
streams for it, and its connections stand. Times are from the beginning of a round, before matchmaking, until the last
of the others has the decoded mean; ratios are to a normal round of the same swarm plus the grace period.

    python -m benchmarks.bench_freeze --quick
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial

from benchmarks.bench_stragglers import handles_of
from benchmarks.findings import Finding, Section, run
from benchmarks.harness import arguments
from benchmarks.swarms import P2PTrainSwarm, Setup

PHASES = ("matchmaking", "scatter", "reduce", "gather", "commit")
GRACE_SECONDS = 3.0
WARM_UP_ROUNDS = 3
COMPUTE_SECONDS = 2.0
"""Between two rounds."""
GOAL = 1.2


def timed_round(swarm: P2PTrainSwarm, taking_part: Sequence[int], freeze: str = "") -> float:
    """One round; seconds until the last of ``taking_part`` has its result.

    Args:
        swarm: All peers.
        taking_part: Whose results are waited for.
        freeze: The phase in which the last peer freezes; empty for none.
    """
    victim = len(swarm.all) - 1
    started = time.monotonic()
    if freeze:
        swarm.all[victim].tell(json.dumps({"do": "go", "delay": 0.0, "freeze": freeze}))
    for index in taking_part:
        swarm.all[index].tell(json.dumps({"do": "go", "delay": 0.0}))
    answers = [swarm.outcome(index) for index in taking_part]
    failures = [answer["failed"] for answer in answers if "failed" in answer]
    if failures:
        raise RuntimeError(failures[0])
    return float(max(answer["finished"] for answer in answers) - started)


def measure(setup: Setup, phase: str) -> tuple[float, float, float]:
    """Seconds of a normal round, of that in which a peer freezes, and of the next."""
    with P2PTrainSwarm(setup) as swarm:
        everybody = list(range(setup.peers))
        normal = []
        for _ in range(WARM_UP_ROUNDS):
            normal.append(timed_round(swarm, everybody))
            time.sleep(COMPUTE_SECONDS)
        with handles_of(swarm, setup.peers - 1):
            frozen = timed_round(swarm, everybody[:-1], phase)
            time.sleep(COMPUTE_SECONDS)
            after = timed_round(swarm, everybody[:-1])
    return statistics.median(normal[1:]), frozen, after


def compare(setup: Setup, phases: Sequence[str], turns: int) -> Section:
    """All phases, each ``turns`` times in a swarm of its own."""
    section = Section(
        f"A peer freezes, {setup.peers} x {setup.num_values / 1e6:g}M {setup.codec}, grace {setup.grace_seconds:g} s",
        ("phase", "normal round (s)", "with it (s)", "the next (s)", "both delays / (0.2 normal + grace)"),
    )
    for phase in phases:
        found = [measure(setup, phase) for _ in range(turns)]
        normal, frozen, after = (statistics.median(each[i] for each in found) for i in range(3))
        delay = max(0.0, frozen - normal) + max(0.0, after - normal)
        ratio = delay / (0.2 * normal + setup.grace_seconds)
        section.rows.append((phase, f"{normal:.2f}", f"{frozen:.2f}", f"{after:.2f}", f"{ratio:.2f}"))
        section.results[phase] = {"normal, frozen, next": found}
        section.findings.append(Finding(f"a peer frozen in {phase}", frozen / (normal + setup.grace_seconds),
                                        "normal + grace", GOAL))  # fmt: skip
    return section


def main(given: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = arguments(__doc__, "scatter and reduce, once each")
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--values", type=int, default=2_000_000)
    parser.add_argument("--codec", choices=("fp32", "int8"), default="int8")
    parser.add_argument("--turns", type=int, default=3, help="times that each phase is measured")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--log", metavar="FILE", help="where the peers' error output goes")
    options = parser.parse_args(given)
    setup = Setup(options.peers, options.values, options.codec, GRACE_SECONDS, log=options.log)
    phases, turns = (("scatter", "reduce"), 1) if options.quick else (options.phases, options.turns)
    return run("freeze", {"phases": partial(compare, setup, phases, turns)}, options)


if __name__ == "__main__":
    sys.exit(main())
