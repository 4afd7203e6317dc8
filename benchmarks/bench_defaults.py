"""Which outer step and which learning-rate schedule suit a manifest's defaults?

    python -m benchmarks.bench_defaults --seeds 3

Four emulated trainers (`benchmarks.emulation`) begin from initial parameters and train with the manifest's own defaults
but for what each row names. Rows are compared with the first one seed by seed, at equal tokens and with equal data.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.emulation import Method, Setting, Swarm
from benchmarks.harness import format_table
from p2ptrain.manifest import DataSpec, ModelSpec
from p2ptrain.training.data.corpus import load_corpus

MODEL = ModelSpec(layers=2, hidden=64, heads=2, intermediate=168, context=64)
ROWS: dict[str, tuple[dict[str, Any], Any]] = {
    "average 0.7, constant": ({"outer_learning_rate": 0.7}, "constant"),
    "average 1.0, constant": ({"outer_learning_rate": 1.0}, "constant"),
    "average 0.7, cosine": ({"outer_learning_rate": 0.7}, "cosine"),
    "average 1.0, cosine": ({"outer_learning_rate": 1.0}, "cosine"),
    "nesterov 0.7, constant": ({"outer": "nesterov", "outer_learning_rate": 0.7}, "constant"),
}


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each row")
    parser.add_argument("--steps", type=int, default=256, help="local steps of each trainer")
    parser.add_argument("--every", type=int, default=32, help="inner steps between outer steps")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the losses here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    corpus = load_corpus(DataSpec(), MODEL.context, MODEL.vocabulary)
    setting = Setting(MODEL, arguments.steps, 4)
    losses: dict[str, list[float]] = {name: [] for name in ROWS}
    for seed in range(arguments.seeds):
        for name, (training, schedule) in ROWS.items():
            method = Method(name, {"every": arguments.every, **training}, "int8", schedule=schedule)
            losses[name].append(Swarm(method, setting, corpus, seed).train().loss)
            print(f"seed {seed}  {name}: {losses[name][-1]:.4f}", flush=True)
    first = losses[next(iter(ROWS))]
    rows = []
    for name, found in losses.items():
        gains = [mine - base for mine, base in zip(found, first, strict=True)]
        rows.append([name, f"{statistics.mean(found):.3f}", f"{min(gains):+.3f} to {max(gains):+.3f}"])
    print(format_table(["", "held-out loss, nats", "beside the first"], rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(losses, indent=2))


if __name__ == "__main__":
    main()
