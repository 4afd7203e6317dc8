"""Random faults and attacks from many seeds, and every scenario: ``python -m tests.lab.chaos [--count N]``.

Each seed draws a swarm of 4 to 10 trainers, one failure a minute for every ten of them, and up to two strangers. The
attacks are those of which no scenario is known to fail. `tests.support.sim.schedules` does the same for faults alone,
and accounts for every token; here the yardstick is the undisturbed run of the same seed.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.lab.__main__ import pin_hashes, run
from tests.lab.scenario import SCENARIOS, Attackers, Expect, Fault, Link, Peers, Scenario, Verdict, read_scenario
from tests.lab.simulated import run_simulated

REPORT = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "reliability.md"
MINUTES = 2.0
PEERS_PER_FAILURE = 10
"""Peers of which one fails each minute."""
FAULTS = ("kill", "stop", "cut", "partition")
GOODPUT = 0.9
"""The least median of honest tokens that count, as a share of the undisturbed run's."""
GOODPUT_IS_KNOWN_TO_FAIL = True
"""Strangers that lead badly cost the others a deadline in each round that they lead."""
LEAST_SEEDS = 200
"""For a median that tells something."""
PROMISE = "Random faults and strangers: one lineage, no foreign round, at least half of the undisturbed rounds."


def harmless_attacks() -> list[str]:
    """Return the attacks of the scenarios that must pass today, by name, one that needs much time left out."""
    scenarios = [read_scenario(path) for path in sorted(SCENARIOS.glob("*.toml"))]
    attacks = {group.attack: False for scenario in scenarios for group in scenario.attackers}
    attacks |= {group.attack: True for each in scenarios if each.known_failure for group in each.attackers}
    return [attack for attack, fails in attacks.items() if not fails and attack != "oversized_records"]


def draw(seed: int, attacks: list[str]) -> Scenario:
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
    strangers = tuple(
        Attackers(attack, at=generator.uniform(5.0, seconds / 2), options={"streams": 8} if attack == "flood" else {})
        for attack in generator.sample(attacks, generator.randint(0, min(2, len(attacks))))
    )
    link = Link(loss_percent=generator.choice((0.0, 0.0, 1.0, 5.0)), delay_ms=generator.choice((10.0, 40.0, 120.0)))
    return Scenario(
        PROMISE, (Peers(count),), seconds=seconds, link=link, faults=tuple(faults), attackers=strangers,
        expect=Expect(share=0.5),
    )  # fmt: skip


def play(seed: int, attacks: list[str]) -> Verdict:
    scenario = draw(seed, attacks)
    undisturbed, disturbed = (run_simulated(scenario, seed, disturbed=each) for each in (False, True))
    return Verdict(f"chaos {seed}", "simulated", seed, scenario, disturbed, undisturbed)


def table(verdicts: Iterable[tuple[str, list[Verdict]]]) -> Iterable[str]:
    """Yield the lines of the report's table: one for each scenario, and one for all seeds of chaos."""
    yield "| scenario | promise | runs | violations | worst recovery (s) | longest gap (s) | rounds | goodput |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for name, runs in verdicts:
        scenario, failed = runs[0].scenario, sum(bool(each.violations) for each in runs)
        known = f" (known: {scenario.known_failure})" if scenario.is_known_to_fail(runs[0].mode) else ""
        yield (
            f"| {name} | {scenario.promise} | {len(runs)} | {failed}{known} |"
            f" {max(each.run.recovery for each in runs):.1f} | {max(each.run.longest_gap for each in runs):.1f} |"
            f" {statistics.median(each.share for each in runs):.0%} |"
            f" {statistics.median(each.goodput for each in runs):.0%} |"
        )


def report(verdicts: list[tuple[str, list[Verdict]]], command: str) -> str:
    return "\n".join(
        [
            "# Reliability",
            "",
            f"`{command}` wrote this page. All runs are simulated, in virtual time. Each runs twice with one seed:",
            "disturbed, and not. *Rounds* and *goodput* (the honest trainers' tokens that count) are relative to the",
            "undisturbed run, and medians over all runs. *Recovery* ends when all honest trainers have committed on",
            "one lineage after the last fault. The *longest gap* is the longest time in which no honest trainer",
            "committed a round. A violation is a run in which an expectation of its scenario did not hold.",
            "[The laboratory](../how-to/lab.md) says how to run one again.",
            "",
            *table(verdicts),
            "",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    import torch

    parser = argparse.ArgumentParser(prog="python -m tests.lab.chaos", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=200, help="how many seeds")
    parser.add_argument("--only-seeds", action="store_true", help="leave out the scenarios, and write no report")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.CRITICAL)
    torch.set_num_threads(1)
    verdicts: list[tuple[str, list[Verdict]]] = []
    unexpected, attacks, seeds = 0, harmless_attacks(), list[Verdict]()
    for path in [] if options.only_seeds else sorted(SCENARIOS.glob("*.toml")):
        verdict = run(path, "simulated", 1)
        verdicts.append((path.stem, [verdict]))
        unexpected += not verdict.is_as_expected
        sys.stdout.write(f"{verdict}\n")
        sys.stdout.flush()
    for seed in range(options.first, options.first + options.count):
        verdict = play(seed, attacks)
        seeds.append(verdict)
        if len(seeds) % 20 == 0:
            sys.stdout.write(f"{len(seeds)} seeds, {unexpected} unexpected\n")
            sys.stdout.flush()
        if not verdict.is_as_expected:
            unexpected += 1
            again = f"python -m tests.lab.chaos --only-seeds --first {seed} --count 1"
            sys.stdout.write(f"{verdict}\n    {verdict.scenario}\n    again: {again}\n")
            sys.stdout.flush()
    if seeds:
        verdicts.append(("chaos", seeds))
        goodput = statistics.median(each.goodput for each in seeds)
        if len(seeds) >= LEAST_SEEDS:
            unexpected += (goodput < GOODPUT) != GOODPUT_IS_KNOWN_TO_FAIL
        known = " (known to fail)" if GOODPUT_IS_KNOWN_TO_FAIL else ""
        sys.stdout.write(f"the median goodput is {goodput:.0%}; the goal is {GOODPUT:.0%}{known}\n")
    sys.stdout.write("\n".join(table(verdicts)) + "\n")
    if not options.only_seeds:
        command = "make chaos" if options.count == 200 else f'make chaos ARGS="--count {options.count}"'
        REPORT.write_text(report(verdicts, command))
    return int(bool(unexpected))


if __name__ == "__main__":
    pin_hashes()
    sys.exit(main())
