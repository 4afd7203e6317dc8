"""What a training loses to two liars in a group of ten, by attack and rule of aggregation.

Each cell is the held-out loss as a multiple of that of ten honest peers under plain mean: the median over seeds, with
the worst behind it. See `tests.support.sim.attacks` for the model and the attacks.

    python -m benchmarks.bench_attacks --json results/attacks.json
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from benchmarks.findings import Finding, Section, run
from benchmarks.harness import Measured, arguments
from p2ptrain.manifest import AveragingSpec
from tests.support.sim.attacks import ATTACKS, Study

STRICT = {"aggregation": "norm_clip", "clip_ratio": 1.0, "max_weight_ratio": 1.0}
RULES: dict[str, dict[str, Any]] = {
    "mean": {"aggregation": "mean"},
    "norm_clip 2": {"aggregation": "norm_clip"},
    "norm_clip 1, one vote": STRICT,
    "norm_clip 1, momentum": {**STRICT, "worker_momentum": 0.5},
    "centered_clip": {"aggregation": "centered_clip"},
    "centered_clip, momentum": {"aggregation": "centered_clip", "worker_momentum": 0.5},
    "trimmed": {"aggregation": "trimmed"},
    "median": {"aggregation": "median"},
}


GOALS = {"norm_clip 1, momentum": 1.05, "centered_clip, momentum": 1.05, "norm_clip 2": None}
"""For the worst of a rule's attacks; the first has the defaults of an open swarm."""


def compare(num_seeds: int, rounds: int, skew: float, rules: list[str]) -> Section:
    """All attacks under some rules."""
    studies = [Study(seed, rounds=rounds, skew=skew) for seed in range(num_seeds)]
    mean = AveragingSpec.model_validate(RULES["mean"])
    clean = [study.run(mean, ATTACKS["nobody lies"], num_hostile=0).loss for study in studies]
    section = Section(
        f"Loss with 2 liars among 10 as a multiple of the clean loss, {num_seeds} seeds: median (worst)",
        ("attack", *rules),
    )
    medians: dict[str, list[float]] = {rule: [] for rule in rules}
    for name, attack in ATTACKS.items():
        cells = []
        for rule in rules:
            spec = AveragingSpec.model_validate(RULES[rule])
            losses = [study.run(spec, attack).loss for study in studies]
            ratios = Measured(tuple(loss / base for loss, base in zip(losses, clean, strict=True)))
            section.results[f"{name}, {rule}"] = ratios.to_json()
            medians[rule].append(ratios.median)
            worst = max(ratios.values)
            cells.append(f"{ratios.median:.3f} ({worst:.3f})" if worst < 10 else "diverges")
        section.rows.append((name, *cells))
    for rule in medians.keys() & GOALS.keys():
        goal = GOALS[rule]
        section.findings.append(Finding(f"worst loss with liars, {rule}", max(medians[rule]), "the clean loss", goal))
    return section


def main() -> int:
    """Train and report."""
    parser = arguments(__doc__, "one seed, 4 rounds")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each kind")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES), help="of which to fill a column")
    parser.add_argument("--rounds", type=int, default=32, help="rounds of each training")
    parser.add_argument("--skew", type=float, default=0.0, help="fraction of a peer's data that is of one class")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.rounds = 1, 4
    torch.set_num_threads(1)
    return run(
        "attacks", {"loss": partial(compare, options.seeds, options.rounds, options.skew, options.rules)}, options
    )


if __name__ == "__main__":
    sys.exit(main())
