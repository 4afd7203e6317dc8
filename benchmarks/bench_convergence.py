"""Does a swarm learn as well as one large batch from the same number of tokens, and what does it send for that?

    make bench-convergence ARGS="--json results/convergence.json --plot docs/benchmarks/convergence.svg"

Four emulated trainers (`benchmarks.emulation`: the product's own codecs, error feedback, fragments and outer steps; no
network) train a small Llama on the Python standard library's sources, byte by byte, and are compared with exact
averaging of every gradient, at equal tokens, with the same data in the same order. As in DiLoCo's paper (arXiv
2311.08105), all go on from one model that large batches have trained for a while; what differs is all that follows. All
learning rates follow the same schedule: a warm-up and half a cosine.

From the curves, the measured time of a step, and what is sent, follows how long each takes to a target loss when every
trainer has a link of 100 Mbit/s. The opponents there are `FULL_GRADIENTS`, which averages each batch's gradients in 8
bits as `hivemind.Optimizer` can, and one machine alone. What does not grow with the model, such as finding a group, is
left out, because it would count for too much beside so small a model's steps. By default some five minutes on two idle
cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.emulation import Method, Run, Setting, Swarm
from benchmarks.findings import Finding, Section
from benchmarks.findings import run as run_parts
from benchmarks.harness import Measured, arguments, progress
from benchmarks.plot import Learning, PlotError, plot_convergence, require_matplotlib
from p2ptrain.manifest import SPARSE_FEEDBACK_DECAY, DataSpec, ModelSpec
from p2ptrain.models import num_parameters
from p2ptrain.training.data.corpus import load_corpus

MODEL = ModelSpec(layers=2, hidden=64, heads=2, kv_heads=2, intermediate=168, context=64)
BEGINNING_STEPS, BEGINNING_SEED = 1000, 0
STEPS, LOCAL_BATCH = 240, 4
LINK_BITS_PER_SECOND = 100e6
TARGET_MARGIN = 1.02
"""How far the target loss lies above what large batches end with from the same seed."""
GOAL = 1.01
"""Of the loss of large batches, for the methods that are recommended."""
RECOMMENDED = ("DiLoCo", "streaming", "SparseLoCo, H = 3")

LARGE_BATCH = "large batch, fp32"
FULL_GRADIENTS = "every step, int8"
ALONE = "one machine alone, small batches"
BEGINNING_RATE = 4e-3
GLOBAL = {"every": 1, "learning_rate": 2e-3}
"""A step for each global batch."""
LOCAL = {"every": 6, "learning_rate": 4e-3, "outer": "average", "outer_learning_rate": 1.0}
"""Local steps, averaged."""
NESTEROV = LOCAL | {"outer": "nesterov", "outer_learning_rate": 0.5, "outer_momentum": 0.5}
SPARSE = Method("SparseLoCo, H = 6", LOCAL, "topk", gathered=True, feedback_decay=SPARSE_FEEDBACK_DECAY)
UNCORRECTED = Method(
    "topk without feedback, rate 4", LOCAL | {"outer_learning_rate": 4.0}, "topk", gathered=True, feedback_decay=0.0
)
METHODS = (
    Method(LARGE_BATCH, GLOBAL),
    Method(FULL_GRADIENTS, GLOBAL, "int8"),
    Method("DiLoCo, int8", NESTEROV, "int8"),
    Method("streaming, 2 fragments, int4", {**NESTEROV, "fragments": 2}, "int4"),
    Method("streaming, overlap of 1 step, int4", {**NESTEROV, "fragments": 2, "overlap_steps": 1}, "int4"),
    SPARSE,
    replace(SPARSE, name="SparseLoCo, H = 3", training=LOCAL | {"every": 3}),
    UNCORRECTED,
    replace(SPARSE, name="topk without feedback, rate 1", feedback_decay=0.0),
    Method("one machine alone, large batches", {**GLOBAL, "local_batch": 4 * LOCAL_BATCH}, workers=1),
    Method(ALONE, GLOBAL, workers=1),
)


@dataclass(frozen=True)
class Row:
    """What the table says of one method.

    Attributes:
        loss: Final held-out losses, one a seed.
        ratio: Of these to large batches, seed by seed.
        bytes_per_token: What a trainer sends for each token that it trains on.
        seconds_to_target: Until the target loss, over links of `LINK_BITS_PER_SECOND`; None where it never gets there.
        seconds_per_step: What each step of that takes.
    """

    method: str
    loss: Measured
    ratio: Measured
    bytes_per_token: float
    seconds_to_target: float | None
    seconds_per_step: float

    def times_as_fast_as(self, other: Row | None) -> float | None:
        """How many times as fast as another it gets to the target; None where one of them never does."""
        if other is None or other.seconds_to_target is None or self.seconds_to_target is None:
            return None
        return other.seconds_to_target / self.seconds_to_target


@dataclass(frozen=True)
class Summary:
    """What the runs of one command say.

    Attributes:
        rows: A row for each method.
        targets: By seed: the loss until which time is counted.
        step_seconds: CPU time of a local batch.
    """

    rows: list[Row]
    targets: dict[int, float]
    step_seconds: float

    def row(self, name: str) -> Row | None:
        """The row of a method, if it ran."""
        return next((row for row in self.rows if row.method == name), None)


def begin(model: ModelSpec, steps: int) -> torch.Tensor:
    """The parameters from which all runs start: those of ``steps`` large batches at a constant rate, in their order."""
    torch.set_num_threads(1)
    corpus = load_corpus(DataSpec(), model.context, model.vocabulary)
    training = {"every": 1, "learning_rate": BEGINNING_RATE, "local_batch": 4 * LOCAL_BATCH}
    method = Method("beginning", training, workers=1, schedule="constant")
    swarm = Swarm(method, Setting(model, steps, LOCAL_BATCH), corpus, BEGINNING_SEED)
    progress(f"beginning, {steps} large batches: loss {swarm.train().loss:.4f}")
    return swarm.parameters()


def run_one(method: Method, setting: Setting, seed: int, beginning: npt.NDArray[np.float32] | None) -> Run:
    """One run in this process; for a pool of processes."""
    torch.set_num_threads(1)
    corpus = load_corpus(DataSpec(), setting.model.context, setting.model.vocabulary)
    start = None if beginning is None else torch.from_numpy(beginning.copy())
    return Swarm(method, setting, corpus, seed, start).train()


def run_all(
    methods: Iterable[Method], setting: Setting, seeds: Sequence[int], jobs: int, beginning: torch.Tensor | None
) -> list[Run]:
    """Every method with every seed, ``jobs`` at a time."""
    context = multiprocessing.get_context("spawn")
    start = None if beginning is None else beginning.numpy()
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        runs = [pool.submit(run_one, method, setting, seed, start) for seed in seeds for method in methods]
        found = []
        for run in runs:
            found.append(run.result())
            progress(f"{found[-1].method}, seed {found[-1].seed}: loss {found[-1].loss:.4f}")
    return found


def seconds_to(target: float, curve: Sequence[tuple[int, float]], seconds_per_step: float) -> float | None:
    """When a curve of (step, loss) first reaches ``target``, between its points in proportion; None for never."""
    before = (0, float("inf"))
    for step, loss in curve:
        if loss <= target:
            share = 1.0 if before[1] == float("inf") else (before[1] - target) / (before[1] - loss)
            return (before[0] + share * (step - before[0])) * seconds_per_step
        before = (step, loss)
    return None


def seconds_per_step(method: Method, run: Run, steps: int, step_seconds: float) -> float:
    """What a step of a trainer takes: its batch, and its part of what is sent, unless that is sent under compute.

    Args:
        method: How the run's trainers synchronise.
        run: What it sent.
        steps: Of each trainer, in that run.
        step_seconds: Computing a batch of `LOCAL_BATCH` samples.
    """
    if method.workers == 1:
        return step_seconds * int(method.training.get("local_batch", LOCAL_BATCH)) / LOCAL_BATCH
    round_seconds = 8 * run.bytes_per_round / LINK_BITS_PER_SECOND
    hidden = int(method.training.get("overlap_steps", 0)) * step_seconds
    return step_seconds + run.rounds / steps * max(0.0, round_seconds - hidden)


def summarize(methods: Sequence[Method], runs: Sequence[Run], steps: int) -> Summary:
    """What the runs of one command say."""
    by_method = {method.name: [run for run in runs if run.method == method.name] for method in methods}
    reference = by_method[LARGE_BATCH]
    large_batch = {run.seed: run.loss for run in reference}
    targets = {run.seed: TARGET_MARGIN * run.curve[-1][1] for run in reference}
    step_seconds = Measured(tuple(run.step_seconds for run in reference)).median
    rows = []
    for method in methods:
        own = by_method[method.name]
        each = seconds_per_step(method, own[0], steps, step_seconds)
        times = [seconds_to(targets[run.seed], run.curve, each) for run in own]
        reached = [seconds for seconds in times if seconds is not None]
        rows.append(
            Row(
                method.name,
                Measured(tuple(run.loss for run in own)),
                Measured(tuple(run.loss / large_batch[run.seed] for run in own)),
                own[0].bytes_per_round * own[0].rounds * method.workers / own[0].tokens,
                Measured(tuple(reached)).median if len(reached) == len(times) else None,
                each,
            )
        )
    return Summary(rows, targets, step_seconds)


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = arguments(__doc__, "one seed, 24 steps after 20 large batches")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=STEPS, help="local batches of each trainer")
    parser.add_argument("--beginning", type=int, default=BEGINNING_STEPS, help="large batches before; 0 for none")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only methods whose names contain one of these")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--plot", metavar="FILE", help="also draw loss against bytes here (.svg or .png)")
    options = parser.parse_args(given)
    if options.plot is not None:
        try:
            require_matplotlib()
        except PlotError as error:
            parser.error(str(error))
    if options.quick:
        options.seeds, options.steps, options.beginning = [1], 24, 20
    return options


def compare(options: argparse.Namespace) -> Section:
    """Run all methods, and draw them if that is asked for."""
    setting = Setting(MODEL, options.steps, LOCAL_BATCH)
    beginning = begin(MODEL, options.beginning) if options.beginning else None
    wanted = options.only or [""]
    methods = [m for m in METHODS if m.name == LARGE_BATCH or any(text in m.name for text in wanted)]
    runs = run_all(methods, setting, options.seeds, options.jobs, beginning)
    summary = summarize(methods, runs, options.steps)
    if options.plot:
        plot_convergence([drawing(row, runs) for row in summary.rows], summary.targets[runs[0].seed], options.plot)
    section = Section(
        f"{setting.workers} trainers, {num_parameters(MODEL)} parameters, {runs[0].tokens / 1e6:.2f}M tokens; time to"
        f" {TARGET_MARGIN:g} of large batches' loss over links of {LINK_BITS_PER_SECOND / 1e6:.0f} Mbit/s, with"
        f" {summary.step_seconds * 1e3:.1f} ms a local batch",
        (
            "method", "loss", "of large batch", "range", "bytes/token", "seconds", "x as fast as full gradients",
            "x as fast as alone",
        ),
        results={"target_losses": summary.targets, "runs": [asdict(run) for run in runs]},
    )  # fmt: skip
    for row in summary.rows:
        faster = [row.times_as_fast_as(summary.row(name)) for name in (FULL_GRADIENTS, ALONE)]
        span = f"{min(row.ratio.values):.4f} to {max(row.ratio.values):.4f}"
        seconds = "never" if row.seconds_to_target is None else f"{row.seconds_to_target:.1f}"
        section.rows.append(
            (
                row.method, f"{row.loss.median:.4f}", f"{row.ratio.median:.4f}", span, f"{row.bytes_per_token:.2f}",
                seconds, *("" if times is None else f"{times:.2f}" for times in faster),
            )
        )  # fmt: skip
        goal = GOAL if row.method.startswith(RECOMMENDED) else None
        section.findings.append(Finding(row.method, row.ratio.median, "large batches' loss", goal, note=span))
    return section


def main(given: Sequence[str] | None = None) -> int:
    """Measure and report."""
    options = parse(given)
    return run_parts("convergence", {"methods": partial(compare, options)}, options)


def drawing(row: Row, runs: Sequence[Run]) -> Learning:
    """What the picture shows of a method: the curve of its first seed, over time."""
    curve = next(run.curve for run in runs if run.method == row.method)
    timed = [(step * row.seconds_per_step, loss) for step, loss in curve]
    return Learning(row.method, row.bytes_per_token, row.ratio.median, timed)


if __name__ == "__main__":
    sys.exit(main())
