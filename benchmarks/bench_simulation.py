"""``p2ptrain simulate`` beside Flower's simulation: a part of `benchmarks.bench_federated`.

    make bench-federated ARGS="--only simulation --simulated 20 100 --json results/simulation.json"

Both deal the same samples to the same sites by a Dirichlet distribution, and train the same network by SGD. All sites
train in each round. The mean is weighted by samples, and measured on all held-out samples. Flower runs
`benchmarks.flower_simulation`, p2ptrain its ordinary command. A round is the time from one measured mean to the next.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.federated_task import BATCH
from benchmarks.findings import Finding, Section
from benchmarks.harness import Measured, PeakMemory, cpu_seconds, progress
from benchmarks.simulation_task import Options, classifier, write_parts
from benchmarks.workers import Workers
from p2ptrain.cli.manifests import load_manifest
from p2ptrain.training.simulation.partition import partition
from p2ptrain.training.simulation.rounds import Simulation

REPORT = "report.json"
PARTITION, SEED = "dirichlet:0.3", 1
WARM_UP = 2
ROUNDS, STEPS, TURNS = 20, 5, 2
VALUES = 5000
"""Parameters of the network, about."""
START_SECONDS, ROUND_SECONDS = 300.0, 120.0
CONTENDERS = ("Flower", "p2ptrain fp32", "p2ptrain int8")
RUN = """
[model]
family = "custom"
[data]
source = "custom"
held_out_fraction = 0.2
[private]
weights = "samples"
[training]
every = {steps}
local_batch = {batch}
clip_norm = 0
[averaging]
codec = "{codec}"
aggregation = "mean"
max_weight_ratio = 1e9
max_norm_ratio = 1e9
"""
SCRIPT = "from benchmarks.simulation_task import classifier\n\n\ndef task(manifest):\n    return classifier({values})\n"


class Run(Workers):
    """One run of one contender, which is one process and those that it starts."""

    def __init__(self, contender: str, options: Options, flower: str, log: str | None) -> None:
        self._is_flower = contender == "Flower"
        super().__init__("benchmarks.flower_simulation" if self._is_flower else "p2ptrain", log)
        self._codec, self._flower = contender.rpartition(" ")[2] if not self._is_flower else "fp32", flower
        self._options = replace(options, folder=self._folder.name)
        self._round, self._began, self._accuracy = 0, 0.0, 0.0
        self._num_held_out: dict[str, int] = {}

    def begin(self) -> None:
        options, folder = self._options, Path(self._options.folder)
        manifest, script = folder / "run.toml", folder / "task.py"
        manifest.write_text(RUN.format(steps=options.steps, batch=BATCH, codec=self._codec))
        script.write_text(SCRIPT.format(values=options.values))
        task = classifier(options.values)
        parts = partition(PARTITION, task.labels, options.sites, SEED)
        simulation = Simulation(load_manifest(manifest), task, parts, SEED)
        write_parts(simulation, options.folder)
        self._num_held_out = {site.name: len(site.held_out) for site in simulation.sites}
        self._began = time.monotonic()
        if self._is_flower:
            self.start(json.dumps(asdict(options)), command=[self._flower])
            return
        self.start(
            "simulate", str(manifest), "--script", str(script), "--sites", str(options.sites),
            "--partition", PARTITION, "--seed", str(SEED), "--rounds", str(options.rounds),
            "--json", str(folder / REPORT),
        )  # fmt: skip

    def next_round(self, timeout_seconds: float = ROUND_SECONDS) -> float:
        """Return the time at the end of the next round; raise `RuntimeError` if none comes in time."""
        (worker,) = self.all
        self._round += 1
        if self._is_flower:
            answer = worker.hear(timeout_seconds)
            self._accuracy = answer["accuracy"]
            return float(answer["at"])
        deadline = time.monotonic() + timeout_seconds
        while worker.line(deadline - time.monotonic()).split()[:1] != [b"%d" % self._round]:
            pass  # the heading
        return time.monotonic()

    def finish(self) -> tuple[float, float]:
        """Wait for the end; return the seconds since the start, and the accuracy after the last round."""
        (worker,) = self.all
        worker.process.wait(START_SECONDS)
        seconds = time.monotonic() - self._began
        if self._is_flower:
            return seconds, self._accuracy
        means = json.loads((Path(self._options.folder) / REPORT).read_text())["rounds"][-1]["by_site"]
        right = sum(number * means[site] for site, number in self._num_held_out.items())
        return seconds, right / sum(self._num_held_out.values())


@dataclass
class Outcome:
    """All runs of one contender.

    Attributes:
        seconds: Of each round after `WARM_UP`.
        totals: Seconds of each run, start and end included.
        cpu: Of all processes for a round, in seconds, by run.
        memory: Peak of all processes, PSS in bytes.
    """

    seconds: list[float] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    accuracy: float = 0.0
    memory: int = 0

    def add(self, run: Run, rounds: int) -> None:
        """Time all rounds of a run; CPU time between the ends of the first and of the last but one that count."""
        ends, cpu = [run.next_round(START_SECONDS)], []
        for number in range(1, rounds):
            ends.append(run.next_round())
            if number in (WARM_UP, rounds - 2):
                cpu.append(cpu_seconds(run.processes()))
        self.seconds += [after - before for before, after in pairwise(ends[WARM_UP:])]
        self.cpu.append((cpu[1] - cpu[0]) / (rounds - 2 - WARM_UP))
        total, self.accuracy = run.finish()
        self.totals.append(total)

    def to_json(self) -> dict[str, Any]:
        """All values, and the medians."""
        return {"median": median(self.seconds), "total": median(self.totals), **asdict(self)}


def measure(options: Options, turns: int, flower: str, log: str | None) -> dict[str, Outcome]:
    """Run all contenders in turn; then sample their memory in shorter runs, which time nothing."""
    found = {name: Outcome() for name in CONTENDERS}
    for turn in range(turns):
        for name, outcome in found.items():
            progress(f"{options.sites} sites, turn {turn + 1}: {name}")
            with Run(name, options, flower, log) as run:
                outcome.add(run, options.rounds)
    short = replace(options, rounds=WARM_UP + 4)
    for name, outcome in found.items():
        progress(f"{options.sites} sites: memory of {name}")
        with Run(name, short, flower, log) as run:
            run.next_round(START_SECONDS)
            with PeakMemory(run.pids) as peak:
                for _ in range(short.rounds - 1):
                    run.next_round()
        outcome.memory = peak.bytes
    return found


def compare(given: argparse.Namespace) -> Section:
    """Rounds, CPU time, memory and accuracy of all contenders and sizes."""
    rounds, turns = (WARM_UP + 4, 1) if given.quick else (ROUNDS, TURNS)
    section = Section(
        f"simulated sites, {VALUES} values, {STEPS} local steps a round, {rounds} rounds, {turns} turns",
        ("", "round (s)", "CPU a round (s)", "whole run (s)", "all processes (MB)", "accuracy"),
    )
    for sites in given.simulated:
        options = Options(sites, VALUES, rounds, STEPS, os.cpu_count() or 1)
        found = measure(options, turns, given.flower_python, given.log)
        for name, one in found.items():
            row = (
                str(Measured(tuple(one.seconds))), f"{median(one.cpu):.3f}", f"{median(one.totals):.1f}",
                f"{one.memory / 1e6:.0f}", f"{one.accuracy:.3f}",
            )  # fmt: skip
            section.rows.append((f"{sites} sites, {name}", *row))
            section.results[f"{sites} sites, {name}"] = one.to_json()
            if name != "Flower":
                ratio = median(one.seconds) / median(found["Flower"].seconds)
                section.findings.append(Finding(f"{sites} simulated sites, {name}: a round", ratio, "Flower", 1.0))
    return section
