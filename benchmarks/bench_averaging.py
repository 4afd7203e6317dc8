"""p2ptrain's averaging against hivemind's: rounds, matchmaking, limited links, stragglers, with the goals beside them.

    make bench-averaging ARGS="--full --json results/averaging.json --plot results/averaging.svg"

By default it takes about ten minutes on two idle cores; ``--full`` measures all sizes. Rate-limited links need root.
hivemind's 8-bit decoder is patched when it runs, because NumPy 2.4 breaks it (`benchmarks.hivemind_peer`).
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks import bench_checks, bench_links, bench_matchmaking, bench_profile, bench_round, bench_stragglers
from benchmarks.findings import Finding, Section, run
from benchmarks.harness import arguments
from benchmarks.plot import PlotError, plot, require_matplotlib
from benchmarks.swarms import Setup

SIZES = ("2x10M", "4x10M")
MASKED_SIZE = "4x10M"
FULL_SIZES = ("2x10M", "2x50M", "4x50M")
MATCHMAKING_PEERS = (2, 4, 8)
RATES = (100e6, 20e6)
"""Bits per second."""
LINK_VALUES = STRAGGLER_VALUES = 10_000_000
PROFILE_ROUNDS, CHECKED_ROUNDS = 20, 15


def size(text: str) -> tuple[int, int]:
    """(peers, values) of a text like ``2x10M``, for argparse."""
    found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)M", text)
    if found is None or int(found[1]) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write peers x millions of values, like 2x10M")
    return int(found[1]), round(1e6 * float(found[2]))


def interpreter(text: str) -> str:
    """The path of an executable, for argparse."""
    found = shutil.which(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be run: give the python of a virtual environment")
    return str(Path(found).absolute())


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__, "2 x 1M values, one round, no links or stragglers unless asked for")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), help="measure these parts")
    parser.add_argument("--full", action="store_true", help="all sizes, more repetitions")
    parser.add_argument("--sizes", nargs="+", type=size, metavar="PxNM", help="rounds of these sizes instead")
    parser.add_argument("--codecs", nargs="+", choices=("fp32", "int8"), default=["fp32", "int8"])
    parser.add_argument("--values", type=int, help="values in the vectors of limited links and stragglers")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each contender and size")
    parser.add_argument("--profile", action="store_true", help="also say where p2ptrain's CPU time goes")
    parser.add_argument(
        "--hivemind-python", metavar="PATH", type=interpreter, default=sys.executable,
        help="run hivemind with this interpreter, which has hivemind and torch",
    )  # fmt: skip
    parser.add_argument("--log", metavar="FILE", help="where the peers' error output goes")
    parser.add_argument("--plot", metavar="FILE", help="also draw the ratios here (.svg or .png)")
    options = parser.parse_args(given)
    if options.rounds < 1 or (options.values is not None and options.values < 1):
        parser.error("--rounds and --values must be at least 1")
    if options.plot is not None:
        if not options.plot.endswith((".svg", ".png")):
            parser.error("--plot takes a file that ends in .svg or .png")
        try:
            require_matplotlib()
        except PlotError as error:
            parser.error(str(error))
    if options.quick:
        options.rounds, options.sizes, options.values = 1, options.sizes or [(2, 1_000_000)], 1_000_000
        options.only = options.only or ["rounds", "checks", "masks"]
    return options


def rounds(options: argparse.Namespace) -> Section:
    """Rounds of all sizes and precisions on loopback."""
    sizes = options.sizes or [size(text) for text in (FULL_SIZES if options.full else SIZES)]
    setups = [
        Setup(peers, num_values, codec, log=options.log, hivemind_python=options.hivemind_python)
        for peers, num_values in sizes
        for codec in options.codecs
    ]
    return bench_round.compare(setups, options.rounds)


def matchmaking(options: argparse.Namespace) -> Section:
    """Until groups stand."""
    times, hivemind_times = (1, 1) if options.quick else (40, 10) if options.full else (20, 5)
    return bench_matchmaking.compare(MATCHMAKING_PEERS, times, hivemind_times, options.log, options.hivemind_python)


def links(options: argparse.Namespace) -> Section | None:
    """Rounds over rate-limited links."""
    count = options.rounds if options.full else min(3, options.rounds)
    return bench_links.compare(RATES, options.values or LINK_VALUES, count, options.log, options.hivemind_python)


def stragglers(options: argparse.Namespace) -> Section:
    """Rounds beside a slow and a stopped peer."""
    turns = 1 if options.quick else 5 if options.full else 3
    return bench_stragglers.compare(options.values or STRAGGLER_VALUES, turns, options.log, options.hivemind_python)


def checks(options: argparse.Namespace) -> Section:
    """Rounds with and without spot checks."""
    sizes = options.sizes or [size(text) for text in SIZES]
    return bench_checks.compare(sizes, options.rounds if options.quick else CHECKED_ROUNDS, options.log)


def masks(options: argparse.Namespace) -> Section:
    """Rounds with and without secure aggregation."""
    sizes = [(max(3, peers), values) for peers, values in options.sizes or [size(MASKED_SIZE)]]
    return bench_checks.compare_masks(sizes, options.rounds, options.log)


def profile(options: argparse.Namespace) -> Section:
    """Where p2ptrain's CPU time goes, for the first size."""
    peers, num_values = (options.sizes or [size(SIZES[0])])[0]
    setups = [Setup(peers, num_values, codec, log=options.log) for codec in options.codecs]
    return bench_profile.profile(setups, PROFILE_ROUNDS)


SECTIONS: dict[str, Callable[[argparse.Namespace], Section | None]] = {
    "rounds": rounds,
    "matchmaking": matchmaking,
    "links": links,
    "stragglers": stragglers,
    "checks": checks,
    "masks": masks,
}


def interpreter_note(options: argparse.Namespace) -> str:
    """With what hivemind runs."""
    same = Path(options.hivemind_python) == Path(sys.executable)
    where = "the same interpreter as p2ptrain" if same else "an interpreter of its own"
    return f"hivemind runs with {where}; its 8-bit decoder is patched for NumPy 2.4."


def main(given: Sequence[str] | None = None) -> int:
    """Measure and report; 1 when a part failed, though the others ran."""
    options = parse(given)
    measured = {name: SECTIONS[name] for name in options.only or SECTIONS}
    if options.profile:
        measured["profile"] = profile
    parts = {name: partial(measure, options) for name, measure in measured.items()}
    sys.stdout.write(f"{interpreter_note(options)}\n\n")

    def draw(findings: Sequence[Finding]) -> None:
        plot(findings, options.plot)
        sys.stdout.write(f"\ndrawn in {options.plot}\n")

    return run("averaging", parts, options, draw if options.plot else None)


if __name__ == "__main__":
    sys.exit(main())
