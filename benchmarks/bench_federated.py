"""A private swarm beside Flower: the same sites, samples, model and local steps, on the same cores.

    make bench-federated ARGS="--sites 5 --values 10 --json results/federated.json"

Both do federated averaging, weighted by samples, without compression; p2ptrain with ``int8`` updates, too. A round is
the time from one set of parameters that a site starts from to the next, local steps included. Flower runs as a server
and sites that connect to it, by calls that start the fewest processes (`benchmarks.flower_peer`); `make` installs it
apart. `benchmarks.bench_simulation` compares simulations.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import socket
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from benchmarks.bench_averaging import interpreter
from benchmarks.bench_simulation import compare as compare_simulations
from benchmarks.federated_task import Options
from benchmarks.findings import Finding, Section, run
from benchmarks.harness import Measured, PeakMemory, arguments, process_trees, progress
from benchmarks.workers import Worker, Workers
from tests.support.processes.daemons import free_port, wait_until

START_SECONDS = 120.0
ROUND_SECONDS = 120.0
LOST_SECONDS = 60.0
"""Time after a kill in which rounds count."""
WARM_UP = 2
CONTENDERS = ("Flower", "p2ptrain fp32", "p2ptrain int8")


@dataclass(frozen=True)
class Outcome:
    """One contender's run.

    Attributes:
        seconds: Of each round after `WARM_UP`.
        largest: Peak of the largest process tree, PSS in bytes; 0 unless it was sampled.
        total: Peak of all processes.
    """

    seconds: Measured
    accuracy: float
    largest: int = 0
    total: int = 0


class Sites(Workers):
    """All processes of one contender; ``sites[0]`` is heard. The first process of ``all`` holds the run together."""

    def __init__(self, contender: str, options: Options, flower: str, log: str | None) -> None:
        is_flower = contender == "Flower"
        super().__init__("benchmarks.flower_peer" if is_flower else "benchmarks.federated_peer", log)
        self._options = replace(options, codec=contender.rpartition(" ")[2] if not is_flower else "fp32")
        self._flower = flower if is_flower else None
        self.sites: list[Worker] = []

    def begin(self) -> None:
        options, number = self._options, self._options.sites
        if self._flower is None:
            first = self.start(json.dumps(asdict(options)))
            link = first.hear(START_SECONDS)["link"]
            options = replace(options, address=link)
            others = [self.start(json.dumps(asdict(replace(options, site=site)))) for site in range(1, number)]
            self.sites = [first, *others]
            return
        port = free_port()
        options, command = replace(options, address=f"127.0.0.1:{port}"), [self._flower]
        self.start(json.dumps(asdict(replace(options, site=-1))), command=command)
        wait_until(partial(_listens, port), START_SECONDS)  # Its sites do not try again.
        self.sites = [
            self.start(json.dumps(asdict(replace(options, site=site))), command=command) for site in range(number)
        ]

    def next_round(self, timeout_seconds: float = ROUND_SECONDS, site: int = 0) -> dict[str, Any]:
        """Return what a site says at the end of the next round; raise `RuntimeError` if none ends in time."""
        deadline = time.monotonic() + timeout_seconds
        while "round" not in (answer := self.sites[site].hear(max(0.0, deadline - time.monotonic()))):
            pass
        return answer

    def kill(self, worker: Worker) -> None:
        """End a process, and what it started, by SIGKILL."""
        for process in process_trees([worker.process.pid]):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False


def rounds_of(sites: Sites, options: Options) -> tuple[Measured, float]:
    """Return the seconds of all rounds after `WARM_UP`, and the accuracy after the last."""
    told = [sites.next_round(START_SECONDS)]
    while told[-1]["round"] < options.rounds:
        told.append(sites.next_round())
    after_warm_up = itertools.pairwise(told[WARM_UP:])
    # A site that was late takes on two rounds at once.
    seconds = [(b["at"] - a["at"]) / (b["round"] - a["round"]) for a, b in after_warm_up]
    return Measured(tuple(seconds)), told[-1]["accuracy"]


def measure(contender: str, options: Options, flower: str, log: str | None) -> Outcome:
    """Time the rounds of one contender; then sample its memory in a shorter run, which times nothing."""
    progress(f"rounds of {contender}")
    with Sites(contender, options, flower, log) as sites:
        seconds, accuracy = rounds_of(sites, options)
    progress(f"memory of {contender}")
    short = replace(options, rounds=WARM_UP + 2)
    with Sites(contender, short, flower, log) as sites, PeakMemory(sites.pids) as peak:
        rounds_of(sites, short)
    return Outcome(seconds, accuracy, max(peak.each), peak.bytes)


def compare(options: argparse.Namespace) -> Section:
    """Rounds, memory and accuracy of all contenders."""
    run_of = Options(0, options.sites, options.values, options.rounds, options.steps)
    section = Section(
        f"{options.sites} sites, {options.values / 1e6:g}M values, {options.steps} local steps a round",
        ("", "round (s)", "largest process (MB)", "all processes (MB)", f"accuracy after {options.rounds} rounds"),
    )
    found = {name: measure(name, run_of, options.flower_python, options.log) for name in CONTENDERS}
    theirs = found["Flower"]
    for name, one in found.items():
        section.rows.append(
            (name, one.seconds, f"{one.largest / 1e6:.0f}", f"{one.total / 1e6:.0f}", f"{one.accuracy:.3f}")
        )
        section.results[name] = {**asdict(one), "seconds": one.seconds.to_json()}
        if name != "Flower":
            goal = 0.5 if name.endswith("fp32") else None
            section.findings += [
                Finding(f"{name}: a round", one.seconds.median / theirs.seconds.median, "Flower", goal),
                Finding(f"{name}: largest process", one.largest / theirs.largest, "Flower"),
            ]
    return section


def after_a_kill(options: argparse.Namespace) -> Section:
    """The rounds of those that are left, once a site is killed, or what holds the run together."""
    section = Section(
        f"Rounds in the {LOST_SECONDS:.0f} s after a kill",
        ("", "killed", "rounds", "longest time without one (s)", "median before (s)"),
    )
    run_of = Options(0, options.sites, options.values, 10_000, options.steps)
    for name in ("Flower", "p2ptrain fp32"):
        for what in ("a site", "the server" if name == "Flower" else "the site that began the swarm"):
            progress(f"{name}: {what} is killed")
            with Sites(name, run_of, options.flower_python, options.log) as sites:
                told = [sites.next_round(START_SECONDS, 1)["at"]]
                told += [sites.next_round(site=1)["at"] for _ in range(WARM_UP + 2)]
                before = statistics.median(later - earlier for earlier, later in itertools.pairwise(told[WARM_UP:]))
                sites.kill(sites.sites[-1] if what == "a site" else sites.all[0])
                ends, until = [time.monotonic()], time.monotonic() + LOST_SECONDS
                with suppress(RuntimeError):
                    while (left := until - time.monotonic()) > 0:
                        ends.append(sites.next_round(left, 1)["at"])
            gaps = [after - before for before, after in itertools.pairwise([*ends, until])]
            section.rows.append((name, what, len(ends) - 1, f"{max(gaps):.1f}", f"{before:.1f}"))
            section.results[f"{name}, {what}"] = {"rounds": len(ends) - 1, "longest": max(gaps), "before": before}
    return section


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__, "3 sites, 0.1M values, 4 rounds, no kills, no simulations unless asked")
    parser.add_argument("--sites", type=int, default=5)
    parser.add_argument("--values", type=float, default=10.0, metavar="MILLIONS", help="parameters of the model")
    parser.add_argument("--rounds", type=int, default=12, help="rounds of each contender")
    parser.add_argument("--steps", type=int, default=2, help="local steps a round")
    parser.add_argument("--simulated", type=int, nargs="+", default=[20, 100], help="sites of the simulations")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), help="measure these parts")
    parser.add_argument(
        "--flower-python", metavar="PATH", type=interpreter, default="build/flower/bin/python",
        help="run Flower with this interpreter, which has flwr, torch and scikit-learn",
    )  # fmt: skip
    parser.add_argument("--log", metavar="FILE", help="where the processes' error output goes")
    options = parser.parse_args(given)
    if options.quick:
        options.sites, options.values, options.rounds, options.only = 3, 0.1, 4, options.only or ["rounds"]
    if options.sites < 3 or options.rounds < WARM_UP + 2 or options.steps < 1 or options.values <= 0:
        parser.error(f"there are at least 3 sites, {WARM_UP + 2} rounds and 1 step")
    options.values = round(1e6 * options.values)
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    return options


SECTIONS = {"rounds": compare, "kills": after_a_kill, "simulation": compare_simulations}


def main() -> int:
    """Measure what the command line asks for."""
    options = parse()
    parts = {name: partial(section, options) for name, section in SECTIONS.items()}
    return run("federated", {name: parts[name] for name in options.only or SECTIONS}, options)


if __name__ == "__main__":
    raise SystemExit(main())
