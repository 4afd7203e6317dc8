"""A pipeline of stages: its cost beside one process, busy links, few bits, hosts that die, hosts that come and go.

    make bench-pipeline ARGS="--json results/pipeline.json"
    python -m benchmarks.bench_pipeline --only utilisation

Each part is a module of its own, which says what is measured and how: `benchmarks.pipeline_overhead`,
`pipeline_utilisation`, `pipeline_codecs`, `pipeline_recovery`, `pipeline_rebalancing`. All but the first simulate: a
busy machine changes how long they take, and no result.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import (
    pipeline_codecs,
    pipeline_overhead,
    pipeline_rebalancing,
    pipeline_recovery,
    pipeline_utilisation,
)
from benchmarks.findings import Section, goal_table
from benchmarks.harness import exit_on_signals, machine


def overhead(options: argparse.Namespace) -> Section:
    """CPU and time beside one process."""
    return pipeline_overhead.compare(options.sizes, options.turns, options.log, options.cores)


def utilisation(options: argparse.Namespace) -> Section:
    """Busy devices, against round trips."""
    return pipeline_utilisation.compare(tflops=options.tflops, in_flight=options.in_flight, workers=options.workers)


def codecs(options: argparse.Namespace) -> Section:
    """Loss, by how activations travel."""
    return pipeline_codecs.compare(range(1, options.seeds + 1), options.steps, options.codecs, options.workers)


def recovery(options: argparse.Namespace) -> Section:
    """Hosts that die."""
    return pipeline_recovery.compare(options.schedules, options.first_schedule, options.workers)


def rebalancing(options: argparse.Namespace) -> Section:
    """Hosts that come and go."""
    seeds = range(options.first_schedule, options.first_schedule + options.traces)
    return pipeline_rebalancing.compare(seeds, options.hours, options.workers)


SECTIONS: dict[str, Callable[[argparse.Namespace], Section]] = {
    "overhead": overhead,
    "utilisation": utilisation,
    "codecs": codecs,
    "recovery": recovery,
    "rebalancing": rebalancing,
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), help="measure these parts")
    sizes = list(pipeline_overhead.MODELS)
    parser.add_argument("--sizes", nargs="+", choices=sizes, default=sizes, help="overhead: which models")
    parser.add_argument("--turns", type=int, default=4, help="overhead: of each contender")
    parser.add_argument("--cores", type=int, default=1, help="overhead: which all processes of a contender share")
    parser.add_argument("--log", metavar="FILE", help="overhead: where the peers' error output goes")
    parser.add_argument("--tflops", type=float, help="utilisation: of every device, instead of the published ones")
    parser.add_argument("--in-flight", type=int, default=0, help="utilisation: microbatches; 0: as many as it takes")
    parser.add_argument("--seeds", type=int, default=3, help="codecs: how many")
    parser.add_argument("--steps", type=int, default=200, help="codecs: how many")
    parser.add_argument(
        "--codecs", nargs="+", choices=pipeline_codecs.CODECS, default=pipeline_codecs.CODECS, help="beside fp32"
    )
    parser.add_argument("--schedules", type=int, default=100, help="recovery: how many of each fault")
    parser.add_argument(
        "--first-schedule", type=int, default=0, help="recovery, rebalancing: the seed of the first one"
    )
    parser.add_argument("--traces", type=int, default=10, help="rebalancing: how many")
    parser.add_argument("--hours", type=float, default=pipeline_rebalancing.HOURS, help="rebalancing: of a trace")
    parser.add_argument("--workers", type=int, default=2, help="processes that simulate at the same time")
    parser.add_argument("--json", metavar="FILE", help="also write all values here")
    options = parser.parse_args(arguments)
    counts = (options.turns, options.seeds, options.steps, options.schedules, options.traces, options.workers)
    if min(counts) < 1 or options.hours <= 0:
        parser.error("--turns, --seeds, --steps, --schedules, --traces, --workers and --hours must be positive")
    most = len(os.sched_getaffinity(0))
    if not 1 <= options.cores <= most:
        parser.error(f"--cores must be from 1 to {most}, which this machine has")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    options = parse(arguments)
    exit_on_signals()
    found: dict[str, Section] = {}
    for name in options.only or SECTIONS:
        started = time.monotonic()
        found[name] = SECTIONS[name](options)
        sys.stdout.write(f"{found[name]}\n({name} took {time.monotonic() - started:.0f} s)\n\n")
        sys.stdout.flush()
    findings = [finding for section in found.values() for finding in section.findings]
    sys.stdout.write(f"{goal_table(findings)}\n")
    if options.json:
        results = {name: section.to_json() for name, section in found.items()}
        payload = {"benchmark": "pipeline", "machine": machine(), "results": results}
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(payload, indent=2) + "\n", encoding="utf-8")
        sys.stdout.write(f"\nwritten to {options.json}\n")


if __name__ == "__main__":
    main()
