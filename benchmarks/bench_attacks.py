"""What a training loses to two liars in a group of ten, by attack and rule of aggregation.

Each cell is the held-out loss as a multiple of that of ten honest peers under plain mean: the median over seeds, with
the worst behind it. See `tests.support.sim.attacks` for the model and the attacks.

    python -m benchmarks.bench_attacks --json results/attacks.json
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.harness import Measured, report
from p2ptrain.manifest import AveragingSpec
from tests.support.sim.attacks import ATTACKS, Study

RULES: dict[str, dict[str, Any]] = {
    "mean": {"aggregation": "mean"},
    "norm_clip 2": {"aggregation": "norm_clip"},
    "norm_clip 1, one vote": {"aggregation": "norm_clip", "clip_ratio": 1.0, "max_weight_ratio": 1.0},
    "centered_clip": {"aggregation": "centered_clip"},
    "trimmed": {"aggregation": "trimmed"},
    "median": {"aggregation": "median"},
}


def main() -> None:
    """Train and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each kind")
    parser.add_argument("--rounds", type=int, default=32, help="rounds of each training")
    parser.add_argument("--skew", type=float, default=0.0, help="fraction of a peer's data that is of one class")
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    studies = [Study(seed, rounds=arguments.rounds, skew=arguments.skew) for seed in range(arguments.seeds)]
    mean = AveragingSpec.model_validate(RULES["mean"])
    clean = [study.run(mean, ATTACKS["nobody lies"], num_hostile=0).loss for study in studies]
    rows, results = [], {}
    for name, attack in ATTACKS.items():
        cells = []
        for rule, settings in RULES.items():
            spec = AveragingSpec.model_validate(settings)
            ratios = Measured(
                tuple(study.run(spec, attack).loss / loss for study, loss in zip(studies, clean, strict=True))
            )
            results[f"{name}, {rule}"] = ratios.to_json()
            worst = max(ratios.values)
            cells.append(f"{ratios.median:.3f} ({worst:.3f})" if worst < 10 else "diverges")
        rows.append((name, *cells))
    title = f"Loss with 2 liars among 10 as a multiple of the clean loss, {arguments.seeds} seeds: median (worst)"
    report(title, ("attack", *RULES), rows, results, arguments.json)


if __name__ == "__main__":
    main()
