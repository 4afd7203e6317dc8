"""Random faults and attacks from many seeds, and every scenario: ``python -m tests.lab.chaos [--count N]``.

Scenarios that say ``real = true`` also run with real processes, where this machine can make network namespaces. Each
seed draws a swarm of 4 to 10 trainers, one failure a minute for every ten of them, and up to two attackers. The
attacks are those of which no scenario is known to fail. `tests.support.sim.schedules` does the same for faults alone,
and accounts for every token; here the yardstick is the undisturbed run of the same seed.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import sys
import textwrap
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from msgspec.structs import replace

from tests.lab.__main__ import pin_hashes, run
from tests.lab.scenario import (
    KNOWN_ROUNDS,
    SCENARIOS,
    SLOW,
    Attackers,
    Expect,
    Fault,
    Link,
    Mode,
    Peers,
    Scenario,
    Verdict,
    read_scenario,
)
from tests.lab.simulated import run_simulated
from tests.support.processes.nat import why_unavailable

REPORT = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "reliability.md"
MINUTES = 2.0
PEERS_PER_FAILURE = 10
"""Peers of which one fails each minute."""
FAULTS = ("kill", "stop", "cut", "partition")
GOODPUT = 0.9
"""The least median of honest tokens that count, as a share of the undisturbed run's."""
LEAST_SEEDS = 200
"""For a median that tells something."""
PROMISE = "Random faults and attackers: one lineage, no foreign round, at least half of the undisturbed rounds."


def harmless_attacks() -> list[Attackers]:
    """Return the attackers of the scenarios that must pass today, but for those that found a swarm or need much time.

    Several members of one swarm could be more than a third of its voters: at most one of those drawn is a member.
    """
    scenarios = [read_scenario(path) for path in sorted(SCENARIOS.glob("*.toml"))]
    failing = {group.attack for each in scenarios if each.known_failure for group in each.attackers}
    found = {group.attack: group for each in scenarios for group in each.attackers if not each.manifest}
    return [group for attack, group in found.items() if attack not in {*failing, "oversized_records"}]


def draw(seed: int, attacks: list[Attackers]) -> Scenario:
    """Return the scenario of a seed."""
    generator = random.Random(f"chaos {seed}")
    count, seconds, at = generator.randint(4, 10), 60.0 * MINUTES, 0.0
    faults: list[Fault] = []
    while (at := at + generator.expovariate(count / PEERS_PER_FAILURE / 60.0)) < seconds - 40.0:
        lasts = generator.uniform(5.0, 35.0)
        free = [f"t{number}" for number in range(1, count)]  # One trainer is never hit: it is the yardstick.
        for fault in faults:
            if fault.at + fault.seconds + 1.0 > at:
                free = [name for name in free if name not in fault.peers]
        kind = generator.choice(FAULTS)
        is_parted = any(f.kind == "partition" and f.at + f.seconds + 1.0 > at for f in faults)
        if not free or (kind == "partition" and is_parted):
            continue
        hit = generator.sample(free, min(len(free), count // 2) if kind == "partition" else 1)
        faults.append(Fault(kind, at, tuple(sorted(hit)), lasts))  # type: ignore[arg-type]
    drawn = generator.sample(attacks, generator.randint(0, min(2, len(attacks))))
    drawn = [each for each in drawn if not each.member] + [each for each in drawn if each.member][:1]
    attackers = tuple(
        replace(
            each,
            at=generator.uniform(5.0, seconds / 2),
            options={"streams": 8} if each.attack == "flood" else each.options,
        )
        for each in drawn
    )
    link = Link(loss_percent=generator.choice((0.0, 0.0, 1.0, 5.0)), delay_ms=generator.choice((10.0, 40.0, 120.0)))
    return Scenario(
        PROMISE, (Peers(count),), seconds=seconds, link=link, faults=tuple(faults), attackers=attackers,
        expect=Expect(share=0.5),
    )  # fmt: skip


def modes_of(path: Path, only_simulated: bool) -> list[Mode]:
    """Return the modes in which to run a scenario; for real only where this machine can."""
    is_real = read_scenario(path).real and not only_simulated and not why_unavailable()
    return ["simulated", "real"] if is_real else ["simulated"]


def play(seed: int, attacks: list[Attackers]) -> Verdict:
    scenario = draw(seed, attacks)
    undisturbed, disturbed = (run_simulated(scenario, seed, disturbed=each) for each in (False, True))
    return Verdict(f"chaos {seed}", "simulated", seed, scenario, disturbed, undisturbed)


def table(verdicts: Iterable[tuple[str, list[Verdict]]]) -> Iterable[str]:
    """Yield the lines of the report's table: one for each scenario, and one for all seeds of chaos."""
    yield "| scenario | promise | runs | violations | recovery (s) | longest round (s) | slow | rounds | goodput | MB |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for name, runs in verdicts:
        scenario, failed = runs[0].scenario, sum(bool(each.violations) for each in runs)
        known = f" (known: {scenario.known_failure})" if scenario.is_known_to_fail(runs[0].mode) else ""
        yield (
            f"| {name} | {scenario.promise} | {len(runs)} | {failed}{known} |"
            f" {max(each.run.recovery for each in runs):.1f} | {max(each.run.longest_round for each in runs):.1f} |"
            f" {max(len(each.slow) for each in runs)} | {statistics.median(each.share for each in runs):.0%} |"
            f" {statistics.median(each.goodput for each in runs):.0%} | {max(each.memory_mb for each in runs):.0f} |"
        )


EXPLANATION = """`{command}` wrote this page. Runs are simulated, in virtual time, unless they are marked as real: these
have processes in network namespaces. Each runs twice with one seed: disturbed, and not. *Rounds* a minute and *goodput*
(the honest trainers' tokens that count) are relative to the undisturbed run, and medians over all runs. The other
figures are the worst of all runs. *Recovery* ends when all honest trainers have committed on one lineage after the last
fault. The *longest round* is that of the slowest trainer that no fault hits. A *slow* round takes {slow:g} times
as long as the longest undisturbed one. After {known} of them, an attacker must be known, and *rounds* count from then
on. *MB* is the growth of memory for each honest peer. A violation is a run in which an expectation of its scenario did
not hold. Where it is known, the text says what does not hold yet. [The laboratory](../how-to/lab.md) says how to run
one again."""


def report(verdicts: list[tuple[str, list[Verdict]]], command: str) -> str:
    explanation = EXPLANATION.format(command=command, slow=SLOW, known=KNOWN_ROUNDS)
    paragraph = textwrap.fill(explanation.replace("\n", " "), 118, break_on_hyphens=False)
    return "\n".join(["# Reliability", "", paragraph, "", *table(verdicts), ""])


def work(job: tuple[Path | int, Mode]) -> Verdict:
    what, mode = job
    return play(what, harmless_attacks()) if isinstance(what, int) else run(what, mode, 1)


def prepare() -> None:
    """Prepare a process that runs scenarios beside others on one machine."""
    import torch

    logging.basicConfig(level=logging.CRITICAL)
    torch.set_num_threads(1)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.chaos", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=200, help="how many seeds")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each in a process of its own")
    parser.add_argument("--simulated", action="store_true", help="run no scenario for real")
    parser.add_argument("--only-seeds", action="store_true", help="leave out the scenarios, and write no report")
    options = parser.parse_args(arguments)
    paths = [] if options.only_seeds else sorted(SCENARIOS.glob("*.toml"))
    jobs: list[tuple[Path | int, Mode]] = [(path, mode) for path in paths for mode in modes_of(path, options.simulated)]
    jobs.sort(key=lambda job: job[1] == "simulated")  # Real ones take longest.
    jobs += [(seed, "simulated") for seed in range(options.first, options.first + options.count)]
    rows: dict[str, list[Verdict]] = {path.stem + kind: [] for path in paths for kind in ("", ", real")}
    unexpected, seeds = 0, list[Verdict]()
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), prepare) as pool:
        for (what, mode), verdict in zip(jobs, pool.map(work, jobs), strict=True):
            unexpected += not verdict.is_as_expected
            if isinstance(what, Path):
                rows[what.stem + ("" if mode == "simulated" else ", real")].append(verdict)
                sys.stdout.write(f"{verdict}\n")
            else:
                seeds.append(verdict)
                if not verdict.is_as_expected:
                    again = f"python -m tests.lab.chaos --only-seeds --first {what} --count 1"
                    sys.stdout.write(f"{verdict}\n    {verdict.scenario}\n    again: {again}\n")
            sys.stdout.flush()
    if seeds:
        goodput = statistics.median(each.goodput for each in seeds)
        unexpected += len(seeds) >= LEAST_SEEDS and goodput < GOODPUT
        sys.stdout.write(f"the median goodput is {goodput:.0%}; the goal is {GOODPUT:.0%}\n")
    verdicts = [(name, runs) for name, runs in {**rows, "chaos": seeds}.items() if runs]
    sys.stdout.write("\n".join(table(verdicts)) + "\n")
    if not options.only_seeds:
        given = " ".join(sys.argv[1:] if arguments is None else arguments)
        command = f'make chaos ARGS="{given}"' if given else "make chaos"
        REPORT.write_text(report(verdicts, command))
    return int(bool(unexpected))


if __name__ == "__main__":
    pin_hashes()
    sys.exit(main())
