"""How much of the possible throughput a pipeline keeps while its hosts come and go: placement and moves, simulated.

Hosts arrive at random (Poisson) and stay for an exponential time; there are as many on average as a scene says. Whoever
leaves was killed: it is missed when nothing new was heard of it for as long as placement waits (`SILENT_SECONDS`). A
newcomer takes part `DOWNLOAD_SECONDS` after it came, a mover as long after it began to take its stage on, and goes on
in its old stage until then. Throughput is that of the slowest stage. What is *possible*: the best placement of the
hosts that are there, at once. All policies see the same hosts come and go.

* *random*: newcomers choose a stage by chance, and nobody moves.
* *every 300 s*, *every 60 s*: the same, and at these times one host moves to the slowest stage from the fastest, if
  that helps (SWARM parallelism's rule).
* *p2ptrain*: the product's decisions, its times, and records that are as old as its own when they are read; see
  `benchmarks.pipeline_moves`.
* *limit*: whoever learns of a host's end as late as these, and whose newcomers and movers take as long, cannot do
  better, whatever they decide. At each moment all hosts that were known `DOWNLOAD_SECONDS` before are dealt out anew,
  as evenly as can be; those that died meanwhile are missing where chance has put them. Nobody can know who is next, so
  a host's stage has nothing to do with its end, and of all ways to deal equal hosts out an even one keeps the slowest
  stage's mean highest.

Published for traces of real preemptions over 32 h (Ryabinin et al., *SWARM parallelism*, arXiv 2301.11913): 82.7 %
without moves, 95.8 % and 97.6 % with moves every 300 and 60 s. The traces are not public, so these are other ones.

Part of `benchmarks.bench_pipeline`, whose ``--only rebalancing --first-schedule 100`` takes other seeds.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from random import Random

from benchmarks.findings import Finding, Section
from benchmarks.harness import Measured, progress
from benchmarks.pipeline_moves import DOWNLOAD_SECONDS, Deciding, Scene, Simulation, Stay

HOURS = 32.0
PUBLISHED = {"random": 82.7, "every 300 s": 95.8, "every 60 s": 97.6}
OURS, LIMIT = "p2ptrain", "limit"
POLICIES = (*PUBLISHED, OURS, LIMIT)
GOAL = 0.985
SCENES = (Scene(64, 4, 3.0), Scene(32, 3, 6.0), Scene(32, 4, 6.0, spread=4.0), Scene(200, 8, 3.0))


def limit(scene: Scene, stays: Sequence[Stay], seconds: float, random: Random) -> float:
    """What nobody can surpass who knows and moves no sooner; see the module. For hosts of one speed."""
    times = sorted({0.0, seconds, *(time for stay in stays for time in _turns(stay) if 0 < time < seconds)})
    done = possible = 0.0
    coming, near = deque(stays), list[Stay]()
    for now, until in itertools.pairwise(times):
        while coming and coming[0].arrives <= now:
            near.append(coming.popleft())
        near = [stay for stay in near if stay.missed > now - DOWNLOAD_SECONDS]
        there = [stay for stay in near if stay.leaves > now]
        known = [stay.leaves > now for stay in near if stay.works_from <= now]
        random.shuffle(known)
        done += min(sum(known[stage :: scene.stages]) for stage in range(scene.stages)) * (until - now)
        possible += scene.possible([stay.speed for stay in there]) * (until - now)
    return done / possible


def _turns(stay: Stay) -> tuple[float, ...]:
    """When something changes for the limit."""
    return stay.arrives, stay.works_from, stay.leaves, stay.missed + DOWNLOAD_SECONDS


# The comparison


@dataclass(frozen=True)
class Case:
    """One simulation.

    Attributes:
        scene: Who comes and goes.
        policy: One of `POLICIES`.
        seed: Of all chance.
        hours: How long.
    """

    scene: Scene
    policy: str
    seed: int
    hours: float


def percent(case: Case) -> float:
    """The share of the possible throughput."""
    stays, seconds = case.scene.stays(case.seed, case.hours), 3600 * case.hours
    random = Random(f"{case.policy} {case.seed}")
    if case.policy == LIMIT:
        return 100 * limit(case.scene, stays, seconds, random)
    kind = Deciding if case.policy == OURS else Simulation
    return 100 * kind(case.scene, case.policy, random).run(stays, seconds)


def compare(seeds: Sequence[int] = range(10), hours: float = HOURS, workers: int = 2) -> Section:
    """All scenes under all policies."""
    section = Section(
        f"% of the possible throughput while hosts come and go, {hours:g} h: median of {len(seeds)} seeds (least)",
        ("hosts", *POLICIES),
        notes=[f"{LIMIT}: nobody can do better who learns of a host's end as late, and downloads for as long."],
    )
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        for scene in SCENES:
            found: dict[str, Measured] = {}
            cells = dict.fromkeys(POLICIES, "")
            for policy in POLICIES if scene.spread == 1 else POLICIES[:-1]:
                cases = [Case(scene, policy, seed, hours) for seed in seeds]
                found[policy] = each = Measured(tuple(pool.map(percent, cases)))
                cells[policy] = f"{each.median:.2f} ({min(each.values):.2f})"
                progress(f"{scene}, {policy}: {cells[policy]}")
            section.results[str(scene)] = {policy: measured.to_json() for policy, measured in found.items()}
            section.rows.append((scene, *cells.values()))
            _add(section, scene, found)
    section.rows.append(("published, real traces", *(f"{value:.1f}" for value in PUBLISHED.values()), "", ""))
    return section


def _add(section: Section, scene: Scene, found: dict[str, Measured]) -> None:
    ours = found[OURS]
    goal = GOAL if scene.spread == 1 else None
    section.findings.append(
        Finding(
            str(scene), ours.median / 100, "the possible throughput", goal, True, note=f"least {min(ours.values):.2f} %"
        )
    )
    if LIMIT in found:
        ratio = Measured(tuple(one / most for one, most in zip(ours.values, found[LIMIT].values, strict=True)))
        section.findings.append(
            Finding(str(scene), ratio.median, "the limit", at_least=True, note=f"least {100 * min(ratio.values):.2f} %")
        )
