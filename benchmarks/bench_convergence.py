"""Does a swarm learn as well as one large batch from the same number of tokens, and what does it send for that?

    make bench-convergence ARGS="--json results/convergence.json --plot docs/convergence.svg"

Four emulated trainers (`benchmarks.emulation`: the product's own codecs, error feedback, fragments and outer steps; no
network) train a small Llama on the Python standard library's sources, byte by byte, and are compared with exact
averaging of every gradient, at equal tokens, with the same data in the same order. All learning rates follow the same
schedule: a warm-up and half a cosine. From the curves, the measured time of a step, and what is sent, follows how long
each takes to a target loss when every trainer has a link of 100 Mbit/s; what does not grow with the model, such as
finding a group, is left out, because it would count for too much beside so small a model's steps. By default 15 minutes
on two idle cores.

``--tune`` tries the grids from which the rates of `METHODS` were chosen, on a seed of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.emulation import Method, Run, Setting, Swarm
from benchmarks.harness import Measured, format_table, machine, progress
from benchmarks.plot import PlotError, plot_convergence, require_matplotlib
from p2ptrain.manifest import DataSpec, ModelSpec
from p2ptrain.models import num_parameters
from p2ptrain.training.text import load_corpus

MODEL = ModelSpec(layers=4, hidden=48, heads=2, kv_heads=2, intermediate=128, context=64)
STEPS, LOCAL_BATCH = 600, 4
EVERY = 6
LINK_BITS_PER_SECOND = 100e6
TARGET_MARGIN = 1.05
"""How far the target loss lies above what large batches end with."""
TUNING_SEED = 1000

LARGE_BATCH = "large batch, fp32"
UNCORRECTED = "topk without feedback, gathered"
ALONE = "one machine alone, large batches"
NESTEROV = {"every": EVERY, "outer": "nesterov", "outer_learning_rate": 0.5, "outer_momentum": 0.5}
AVERAGE = {"every": EVERY, "outer": "average", "outer_learning_rate": 1.0}
ADAM = {"every": EVERY, "outer": "adam", "outer_learning_rate": 0.005, "outer_momentum": 0.5}
SPARSE = {**AVERAGE, "outer_learning_rate": 1.4}
STREAMING = {**NESTEROV, "fragments": 2}
GLOBAL, LOCAL = {"learning_rate": 4e-3}, {"learning_rate": 8e-3}
"""Inner rates, with a step for each global batch and with local steps."""
METHODS = (
    Method(LARGE_BATCH, {"every": 1, **GLOBAL}),
    Method("DiLoCo, fp32", NESTEROV | LOCAL),
    Method("DiLoCo, int8", NESTEROV | LOCAL, codec="int8"),
    Method("DiLoCo, int4", NESTEROV | LOCAL, codec="int4"),
    Method("averaging, int8", AVERAGE | LOCAL, codec="int8"),
    Method("outer Adam, int8", ADAM | LOCAL, codec="int8"),
    Method("streaming, 2 fragments, int4", STREAMING | LOCAL, codec="int4"),
    Method("streaming, overlap of 1 step, int4", {**STREAMING, **LOCAL, "overlap_steps": 1}, codec="int4"),
    Method("SparseLoCo, gathered", SPARSE | LOCAL, codec="topk", gathered=True),
    Method(UNCORRECTED, {**SPARSE, **LOCAL, "outer_learning_rate": 4.0}, "topk", gathered=True, feedback=False),
    Method("every step, int8", {"every": 1, **GLOBAL}, codec="int8"),
    Method("every step, powersgd", {"every": 1, **GLOBAL}, codec="powersgd"),
    Method("every step, topk, gathered", {"every": 1, **GLOBAL}, codec="topk", gathered=True),
    Method(ALONE, {"every": 1, **GLOBAL, "local_batch": 4 * LOCAL_BATCH}, workers=1),
    Method("one machine alone, small batches", {"every": 1, **GLOBAL}, workers=1),
)
GRIDS: dict[str, list[dict[str, Any]]] = {
    LARGE_BATCH: [{"learning_rate": rate} for rate in (4e-3, 8e-3)],
    "DiLoCo, fp32": [
        {"outer_learning_rate": rate, "outer_momentum": momentum}
        for rate, momentum in ((0.5, 0.5), (0.7, 0.5), (1.0, 0.5), (0.4, 0.9), (0.7, 0.9))
    ],
    "averaging, int8": [{"learning_rate": rate} for rate in (4e-3, 8e-3)],
    "outer Adam, int8": [
        {"outer_learning_rate": rate, "outer_momentum": momentum}
        for rate, momentum in ((0.005, 0.5), (0.01, 0.9), (0.03, 0.9))
    ],
    "SparseLoCo, gathered": [{"outer_learning_rate": rate} for rate in (1.0, 1.4, 2.0)],
    UNCORRECTED: [{"outer_learning_rate": rate} for rate in (1.0, 2.0, 4.0)],
}


@dataclass(frozen=True)
class Row:
    """What the table says of one method.

    Attributes:
        loss: Final held-out losses, one a seed.
        ratio: Of these to large batches, seed by seed.
        bytes_per_token: What a trainer sends for each token that it trains on.
        seconds_to_target: Until the target loss, over links of `LINK_BITS_PER_SECOND`; None where it never gets there.
    """

    method: str
    loss: Measured
    ratio: Measured
    bytes_per_token: float
    seconds_to_target: float | None


def run_one(method: Method, setting: Setting, seed: int) -> Run:
    """One run in this process; for a pool of processes."""
    torch.set_num_threads(1)
    data = DataSpec()
    corpus = load_corpus(data, setting.model.context, setting.model.vocabulary)
    return Swarm(method, setting, corpus, seed).train()


def run_all(methods: Iterable[Method], setting: Setting, seeds: Sequence[int], jobs: int) -> list[Run]:
    """Every method with every seed, ``jobs`` at a time."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        runs = [pool.submit(run_one, method, setting, seed) for seed in seeds for method in methods]
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


def summarize(methods: Sequence[Method], runs: Sequence[Run], steps: int) -> tuple[list[Row], float]:
    """A row for each method, and the target loss."""
    by_method = {method.name: [run for run in runs if run.method == method.name] for method in methods}
    reference = by_method[LARGE_BATCH]
    large_batch = {run.seed: run.loss for run in reference}
    target = TARGET_MARGIN * Measured(tuple(run.curve[-1][1] for run in reference)).median
    step_seconds = Measured(tuple(run.step_seconds for run in reference)).median
    rows = []
    for method in methods:
        own = by_method[method.name]
        each = seconds_per_step(method, own[0], steps, step_seconds)
        times = [seconds_to(target, run.curve, each) for run in own]
        reached = [seconds for seconds in times if seconds is not None]
        rows.append(
            Row(
                method.name,
                Measured(tuple(run.loss for run in own)),
                Measured(tuple(run.loss / large_batch[run.seed] for run in own)),
                own[0].bytes_per_round * own[0].rounds * method.workers / own[0].tokens,
                Measured(tuple(reached)).median if len(reached) == len(times) else None,
            )
        )
    return rows, target


def tune(setting: Setting, jobs: int) -> None:
    """Print the loss of every candidate of `GRIDS`."""
    known = {method.name: method for method in METHODS}
    candidates = [
        replace(known[name], name=f"{name} {changes}", training={**known[name].training, **changes})
        for name, grid in GRIDS.items()
        for changes in grid
    ]
    runs = run_all(candidates, setting, [TUNING_SEED], jobs)
    sys.stdout.write(format_table(("candidate", "loss"), [(run.method, f"{run.loss:.4f}") for run in runs]) + "\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=STEPS, help="local batches of each trainer")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only methods whose names contain one of these")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--tune", action="store_true", help="try the grids instead")
    parser.add_argument("--json", metavar="FILE", help="also write all values here")
    parser.add_argument("--plot", metavar="FILE", help="also draw loss against bytes here (.svg or .png)")
    options = parser.parse_args(arguments)
    if options.plot is not None:
        try:
            require_matplotlib()
        except PlotError as error:
            parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and report as a table, JSON and a picture."""
    options = parse(arguments)
    setting = Setting(MODEL, options.steps, LOCAL_BATCH)
    if options.tune:
        tune(setting, options.jobs)
        return 0
    wanted = options.only or [""]
    methods = [m for m in METHODS if m.name == LARGE_BATCH or any(text in m.name for text in wanted)]
    runs = run_all(methods, setting, options.seeds, options.jobs)
    rows, target = summarize(methods, runs, options.steps)
    report(rows, runs, setting, target)
    if options.json:
        results = {
            "parameters": num_parameters(MODEL),
            "steps": options.steps,
            "local_batch": LOCAL_BATCH,
            "every": EVERY,
            "seeds": options.seeds,
            "target_loss": target,
            "methods": [{**asdict(m), "row": row_to_json(row)} for m, row in zip(methods, rows, strict=True)],
            "runs": [asdict(run) for run in runs],
        }
        payload = {"benchmark": "convergence", "machine": machine(), "results": results}
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(payload, indent=2) + "\n", encoding="utf-8")
    if options.plot:
        drawn = [(row.method, row.bytes_per_token, row.ratio.median) for row in rows if row.bytes_per_token]
        plot_convergence(drawn, options.plot)
    return 0


def row_to_json(row: Row) -> dict[str, Any]:
    """The row's values."""
    return {
        "loss": row.loss.to_json(),
        "ratio": row.ratio.to_json(),
        "bytes_per_token": row.bytes_per_token,
        "seconds_to_target": row.seconds_to_target,
    }


def report(rows: Sequence[Row], runs: Sequence[Run], setting: Setting, target: float) -> None:
    """Print the table."""
    tokens = runs[0].tokens
    sys.stdout.write(
        f"{setting.workers} trainers, {num_parameters(setting.model)} parameters, {tokens / 1e6:.2f}M tokens;"
        f" time to a loss of {target:.3f} over links of {LINK_BITS_PER_SECOND / 1e6:.0f} Mbit/s\n\n"
    )
    headers = ("method", "loss", "of large batch", "range", "bytes/token sent", "seconds to target")
    table = [
        (
            row.method,
            f"{row.loss.median:.4f}",
            f"{row.ratio.median:.4f}",
            f"{min(row.ratio.values):.4f} to {max(row.ratio.values):.4f}",
            f"{row.bytes_per_token:.2f}",
            "never" if row.seconds_to_target is None else f"{row.seconds_to_target:.1f}",
        )
        for row in rows
    ]
    sys.stdout.write(format_table(headers, table) + "\n")


if __name__ == "__main__":
    sys.exit(main())
