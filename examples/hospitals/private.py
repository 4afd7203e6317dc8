"""Five hospitals with differential privacy of each patient: a hospital stops at its budget, and the others train on.

The model is linear, and normalises nothing: statistics of patients would leave beside what the bound covers. Each
measurement is divided by a power of ten of its unit instead. It needs p2ptrain[privacy].
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from examples import sites
from examples.hospitals.train import BATCH, EVERY, MANIFEST, ROUNDS, SITES, Records, auc, load, scores
from p2ptrain import Swarm
from p2ptrain.training.optimizer import SwarmOptimizer

PRIVATE: dict[str, Any] = {
    **MANIFEST,
    # A hospital that has spent its budget is not waited for.
    "averaging": {"codec": "fp32", "aggregation": "mean", "min_peers": 1, "quorum": 1.0},
    "differential_privacy": {"epsilon": 8.0, "delta": 1e-3, "noise_multiplier": 2.0},
}
MAGNITUDES = torch.tensor([
    10, 10, 100, 1000, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1,
    1, 1, 1, 10, 0.01, 0.01, 0.01, 0.01, 0.01, 0.001,
    10, 10, 100, 1000, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1,
])  # fmt: skip
"""Powers of ten for radius, texture, perimeter, area, smoothness, …: their means, standard errors and worst values."""


class ByMagnitude(torch.nn.Module):
    """Scales measurements by constants that no patient changes."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the scaled measurements, ``[patients, 30]``."""
        return (values / MAGNITUDES - 1).clamp(-3, 3)


def make_model() -> torch.nn.Module:
    """Return a linear classifier."""
    torch.manual_seed(0)
    return torch.nn.Sequential(ByMagnitude(), torch.nn.Linear(30, 1), torch.nn.Flatten(0))


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, records: Records, chosen: list[int] | torch.Tensor
) -> None:
    """Take one step on these patients."""
    model.train()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(records[0][chosen]), records[1][chosen])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def drawn(swarm: Swarm, patients: torch.Tensor) -> Iterator[list[int]]:
    """Yield the patients of one private step after another."""
    batches = swarm.batches(patients)
    while True:
        yield from batches


def is_over(opt: SwarmOptimizer) -> bool:
    """True after the last round, or if this hospital's budget is spent and nobody is left to follow."""
    return opt.round >= ROUNDS or (opt.is_spent and not opt.others_train)


def train(swarm: Swarm, site: int, seed: int) -> dict[str, Any]:
    """Train as one hospital until the last round, or its budget is spent; follow the others then."""
    own, apart = load(site, seed)
    num_held_out = max(1, len(own[0]) // 5)
    held_out, kept = (own[0][:num_held_out], own[1][:num_held_out]), (own[0][num_held_out:], own[1][num_held_out:])
    model, curve = make_model(), []
    inner = torch.optim.SGD(model.parameters(), 0.3)  # Moments of Adam would be those of noise.
    opt = swarm.optimizer(model, inner, tokens_per_step=BATCH, site_samples=len(kept[0]))
    batches = drawn(swarm, kept[0])

    def report() -> None:
        opt.report(((scores(model, held_out) > 0) == (held_out[1] > 0)).float().tolist(), "accuracy")

    report()
    while len(opt.evaluations()) < SITES:  # One that began alone would spend its budget without the others.
        time.sleep(0.2)
    while not is_over(opt):
        before = opt.round
        train_step(model, opt, kept, next(batches))
        if opt.round != before:
            curve.append(auc(model, apart))
            report()
    return {"curve": curve, "patients": len(kept[0]), "privacy": opt.privacy, "is_spent": opt.is_spent}


def train_alone(site: int | None, seed: int) -> float:
    """Return the AUC of the same model without noise, on one hospital's records, or on all for None."""
    records, apart = load(site, seed)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    for _ in range(ROUNDS * EVERY):
        train_step(model, optimizer, records, torch.randint(len(records[0]), (BATCH,)))
    return auc(model, apart)


def compare(found: dict[str, list[Any]], seed: int) -> sites.Curves:
    """Return the AUC on the records kept apart, beside models without noise, and what the hospitals spent."""
    results = found["hospitals"]
    for site, result in enumerate(results):
        print(f"site {site}: {result['patients']} patients, {result['privacy']}")
    last = max((result for result in results if not result["is_spent"]), key=lambda result: len(result["curve"]))
    alone = sorted(train_alone(site, seed) for site in range(SITES))
    return {
        "swarm": last["curve"],
        "pooled": [train_alone(None, seed)],
        "best_alone": alone[-1:],
        "worst_alone": alone[:1],
        "spent": [sum(result["is_spent"] for result in results)],
        "epsilon": [max(result["privacy"].epsilon for result in results)],
    }


if __name__ == "__main__":
    sites.main(__doc__ or "", train, [PRIVATE], SITES, compare, "AUC on 114 patients kept apart")
