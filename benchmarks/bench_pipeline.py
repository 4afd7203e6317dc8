"""A pipeline of stages: its cost beside one process, busy links, few bits, hosts that die, hosts that come and go.

    make bench-pipeline ARGS="--json results/pipeline.json"
    python -m benchmarks.bench_pipeline --only utilisation

Each part is a module of its own, which says what is measured and how: `benchmarks.pipeline_overhead`,
`pipeline_utilisation`, `pipeline_codecs`, `pipeline_recovery`, `pipeline_rebalancing`. All but the first simulate: a
busy machine changes how long they take, and no result.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks import (
    pipeline_codecs,
    pipeline_overhead,
    pipeline_rebalancing,
    pipeline_recovery,
    pipeline_utilisation,
)
from benchmarks.findings import Section, run
from benchmarks.harness import arguments


def overhead(options: argparse.Namespace) -> Section:
    """CPU and time beside one process."""
    return pipeline_overhead.compare(options.sizes, options.turns, options.log, options.cores)


def utilisation(options: argparse.Namespace) -> Section:
    """Busy devices, against round trips."""
    most = 1 if options.quick else None
    shapes, rates = pipeline_utilisation.SHAPES[:most], pipeline_utilisation.BITS_PER_SECOND[:most]
    return pipeline_utilisation.compare(shapes, rates, options.tflops, options.in_flight, options.workers)


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


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__, "one seed, few steps, schedules and hours; one shape and rate; the small model")
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
    options = parser.parse_args(given)
    if options.quick:
        options.sizes, options.turns, options.seeds, options.steps = ["small"], 1, 1, 20
        options.schedules, options.traces, options.hours = 4, 1, 1.0
    counts = (options.turns, options.seeds, options.steps, options.schedules, options.traces, options.workers)
    if min(counts) < 1 or options.hours <= 0:
        parser.error("--turns, --seeds, --steps, --schedules, --traces, --workers and --hours must be positive")
    most = len(os.sched_getaffinity(0))
    if not 1 <= options.cores <= most:
        parser.error(f"--cores must be from 1 to {most}, which this machine has")
    return options


def main(given: Sequence[str] | None = None) -> int:
    """Measure and report."""
    options = parse(given)
    return run("pipeline", {name: partial(SECTIONS[name], options) for name in options.only or SECTIONS}, options)


if __name__ == "__main__":
    sys.exit(main())
