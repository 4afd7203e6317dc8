"""How long it takes until a group stands, p2ptrain against hivemind, when all peers are ready at about the same time.

Each time every peer is ready after a random delay of up to 0.2 s. Counted is from the first that is ready until the
last knows its group, and in how many cases that was one group of all. p2ptrain's peers know of each other from records,
as in a swarm that is up; hivemind's look each other up in its DHT, as they do before every round. Either may form
smaller groups. Part of `benchmarks.bench_averaging`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from benchmarks.findings import Finding, Section
from benchmarks.harness import Measured, progress
from benchmarks.swarms import AveragingSwarm, HivemindSwarm, Match, P2PTrainSwarm, Setup

NUM_VALUES = 1024
LONGEST_DELAY_SECONDS = 0.2
GRACE_SECONDS = 3.0
"""As in a real swarm: whom p2ptrain does not wait for longer is not in the group."""
P95_SECONDS = 1.0


def measure(swarm: AveragingSwarm, times: int, seed: int = 0) -> list[Match]:
    """Have the peers find each other so many times, after one to warm up; delays are the same for all contenders."""
    delays = random.Random(seed)
    found: list[Match] = []
    with swarm:
        for _ in range(times + 1):
            found.append(swarm.match([delays.uniform(0, LONGEST_DELAY_SECONDS) for _ in swarm.all]))
    return found[1:]


def compare(sizes: Sequence[int], times: int, hivemind_times: int, log: str | None, hivemind_python: str) -> Section:
    """Groups of all sizes."""
    section = Section(
        f"Until the group stands: all peers ready within {LONGEST_DELAY_SECONDS} s",
        ("peers", "", "times", "p50 (s)", "p95 (s)", "one full group"),
    )
    for peers in sizes:
        setup = Setup(peers, NUM_VALUES, "int8", GRACE_SECONDS, 2, log=log, hivemind_python=hivemind_python)
        of: dict[str, tuple[Measured, float]] = {}
        for swarm, count in ((P2PTrainSwarm(setup), times), (HivemindSwarm(setup), hivemind_times)):
            progress(f"matchmaking of {peers} peers, {swarm.name}")
            matches = measure(swarm, count)
            seconds = Measured(tuple(match.seconds for match in matches))
            full = sum(set(match.members) == {peers} for match in matches) / len(matches)
            of[swarm.name] = seconds, full
            section.rows.append(
                (peers, swarm.name, count, f"{seconds.median:.3f}", f"{seconds.quantile(0.95):.3f}", f"{full:.0%}")
            )
            section.results[f"{peers} {swarm.name}"] = _to_json(matches, seconds, full)
        section.findings += findings(peers, *of["p2ptrain"], of["hivemind"][0])
    section.notes.append(
        "hivemind waits up to 2 s for a group that is not full (its default is 5), and may form groups of 2 or more."
    )
    return section


def findings(peers: int, seconds: Measured, full: float, theirs: Measured) -> list[Finding]:
    """The ratios for one number of peers."""
    p95 = seconds.quantile(0.95)
    return [
        Finding(f"{peers} peers: p95 until the group stands", p95, "1 s", P95_SECONDS),
        Finding(f"{peers} peers: one full group", full, "all times", 1.0, at_least=True),
        Finding(f"{peers} peers: p50 until the group stands", seconds.median / theirs.median, "hivemind"),
    ]


def _to_json(matches: Sequence[Match], seconds: Measured, full: float) -> dict[str, Any]:
    members = [match.members for match in matches]
    p95 = seconds.quantile(0.95)
    return {"seconds": seconds.to_json(), "p95": p95, "one_full_group": full, "members": members}
