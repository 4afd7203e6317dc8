"""Five hospitals with secure aggregation of their updates, and differential privacy of each patient.

Each step reads all patients of a hospital, so that hospitals of all sizes spend their budgets alike. Scales computed
from patients would leave beside what the bound covers. So the model learns each measurement's centre and spread by the
same noisy steps as its weights. It needs p2ptrain[privacy].
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from examples import sites
from examples.hospitals.train import MANIFEST, SITES, Records, auc, load, scores
from p2ptrain import Swarm
from p2ptrain.training.optimizer import SwarmOptimizer

ROUNDS, EVERY = 20, 4
ALL = 1024
"""A batch of more patients than a hospital has: each step reads all of them."""
PRIVATE: dict[str, Any] = {
    **MANIFEST,
    "training": {"every": EVERY, "local_batch": ALL, "rounds": ROUNDS},
    "averaging": {"min_peers": 3, "quorum": 1.0},  # A hospital that has spent its budget is not waited for.
    "private": {"weights": "bucketed"},
    "differential_privacy": {"epsilon": 8.0, "delta": 1e-3, "noise_multiplier": 5.0},  # For 92 steps; 80 are planned.
    "secure_aggregation": {},
}
MAGNITUDES = torch.tensor([
    10, 10, 100, 1000, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1,
    1, 1, 1, 10, 0.01, 0.01, 0.01, 0.01, 0.01, 0.001,
    10, 10, 100, 1000, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1,
])  # fmt: skip
"""Powers of ten for radius, texture, perimeter, area, smoothness, …: their means, standard errors and worst values."""


class Normaliser(torch.nn.Module):
    """Holds centre and spread of each measurement, as parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = torch.nn.Parameter(torch.zeros(30))
        self.spread = torch.nn.Parameter(torch.full((30,), 0.2))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return what centre and spread miss of each value, ``[patients, 2, 30]``; the mean of squares fits them."""
        off = values - self.centre
        return torch.stack([off, 1.25 * off.detach().abs() - self.spread], 1)  # A Gaussian's deviation by its mean |x|.


class Classifier(torch.nn.Module):
    """A linear classifier of normalised measurements."""

    def __init__(self) -> None:
        super().__init__()
        self.normaliser, self.linear = Normaliser(), torch.nn.Linear(30, 1)
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return each patient's logit, ``[patients]``."""
        return self.with_misses(values)[0]

    def with_misses(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits, and what the normaliser misses, which the classifier's loss does not change."""
        misses = self.normaliser(((values / MAGNITUDES).sqrt() - 1).clamp(-1.5, 1.5))
        scaled = misses[:, 0].detach() / self.normaliser.spread.detach().clamp(min=0.05)
        return self.linear(scaled.clamp(-4, 4)).flatten(), misses


def make_optimizer(model: Classifier) -> torch.optim.Optimizer:
    """Return plain SGD: moments of Adam would be those of noise."""
    return torch.optim.SGD([
        {"params": model.linear.parameters(), "lr": 1.0}, {"params": model.normaliser.parameters(), "lr": 0.3}
    ])  # fmt: skip


def train_step(
    model: Classifier, optimizer: torch.optim.Optimizer, records: Records, chosen: list[int] | slice
) -> None:
    """Take one step on these patients."""
    model.train()
    logits, misses = model.with_misses(records[0][chosen])
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, records[1][chosen])
    (loss + 0.25 * misses.square().sum((1, 2)).mean()).backward()
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
    model, curve = Classifier(), []
    opt = swarm.optimizer(model, make_optimizer(model), site_samples=len(kept[0]))
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
    """Return the AUC of this model without noise, after ten times the steps, on one hospital's records or on all."""
    records, apart = load(site, seed)
    model = Classifier()
    optimizer = make_optimizer(model)
    for _ in range(10 * ROUNDS * EVERY):
        train_step(model, optimizer, records, slice(None))
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
