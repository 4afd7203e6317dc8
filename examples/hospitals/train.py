"""Five hospitals train one classifier of tumours; no patient's record leaves its hospital.

The records are scikit-learn's breast cancer data: 30 measurements of 569 tumours. The hospitals are of unequal size.
Each sees another mix of benign and malignant tumours. A fifth of all records is kept apart to compare on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split

from examples import sites
from p2ptrain import Swarm, pooled

SITES, ROUNDS, EVERY, BATCH = 5, 20, 10, 16
MANIFEST = {
    "name": "hospitals",
    "model": {"family": "custom"},
    "data": {"source": "custom"},
    "training": {"every": EVERY, "local_batch": BATCH, "rounds": ROUNDS},
    "averaging": {"codec": "fp32", "aggregation": "mean", "min_peers": SITES, "quorum": 1.0},
    "private": {"weights": "samples", "proximal": 0.01},
}
Records = tuple[torch.Tensor, torch.Tensor]
"""Measurements, ``[patients, 30]``, and whether the tumour is benign, ``[patients]``."""


def load(site: int | None, seed: int) -> tuple[Records, Records]:
    """Return the training records of one hospital, or of all for None, and the records kept apart."""
    values, benign = load_breast_cancer(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        values, benign, test_size=0.2, stratify=benign, random_state=seed
    )
    if site is not None:
        draws = np.random.default_rng(seed)
        shares = draws.dirichlet([1.0] * SITES, size=2)  # Of benign and malignant tumours, by hospital.
        hospital = np.empty(len(train_y), dtype=int)
        for label in (0, 1):
            order = draws.permutation(np.flatnonzero(train_y == label))
            borders = (np.cumsum(shares[label])[:-1] * len(order)).astype(int)
            for number, part in enumerate(np.split(order, borders)):
                hospital[part] = number
        train_x, train_y = train_x[hospital == site], train_y[hospital == site]
    tensors = [torch.from_numpy(each).float() for each in (train_x, train_y, test_x, test_y)]
    return (tensors[0], tensors[1]), (tensors[2], tensors[3])


def make_model() -> torch.nn.Module:
    """Return a classifier that normalises what it reads: the statistics are averaged as the weights are."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1), torch.nn.Flatten(0)
    )


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, records: Records) -> None:
    """Take one step on a batch of random patients."""
    model.train()
    chosen = torch.randint(len(records[0]), (BATCH,))
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(records[0][chosen]), records[1][chosen])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def scores(model: torch.nn.Module, records: Records) -> torch.Tensor:
    """Return the logit of each patient."""
    model.eval()
    logits: torch.Tensor = model(records[0])
    return logits


def auc(model: torch.nn.Module, records: Records) -> float:
    """Return the area under the ROC curve."""
    return float(roc_auc_score(records[1].numpy(), scores(model, records).numpy()))


def train(swarm: Swarm, site: int, seed: int) -> dict[str, Any]:
    """Train as one hospital, and report how many of its own patients the model gets right."""
    own, apart = load(site, seed)
    num_held_out = max(1, len(own[0]) // 5)
    held_out, kept = (own[0][:num_held_out], own[1][:num_held_out]), (own[0][num_held_out:], own[1][num_held_out:])
    model, curve = make_model(), []
    inner = torch.optim.AdamW(model.parameters(), 3e-3)
    opt = swarm.optimizer(model, inner, tokens_per_step=BATCH, site_samples=len(kept[0]))
    while opt.round < ROUNDS:
        before = opt.round
        train_step(model, opt, kept)
        if opt.round != before:
            curve.append(auc(model, apart))
            opt.report(((scores(model, held_out) > 0) == (held_out[1] > 0)).float().tolist(), "accuracy")
    found = pooled(list(opt.evaluations().values()))
    return {"curve": curve, "patients": len(kept[0]), "own": found}


def train_alone(site: int | None, seed: int) -> list[float]:
    """Return the AUC after each round's number of steps on one hospital's records, or on all for None."""
    records, apart = load(site, seed)
    model, curve = make_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(ROUNDS * EVERY):
        train_step(model, optimizer, records)
        if (step + 1) % EVERY == 0:
            curve.append(auc(model, apart))
    return curve


def compare(found: dict[str, list[Any]], seed: int) -> sites.Curves:
    """Return the AUC on the records kept apart: of the swarm, of all records in one place, of single hospitals."""
    results = found["hospitals"]
    for site, result in enumerate(results):
        print(f"site {site}: {result['patients']} patients")
    if own := results[0]["own"]:
        print(f"on the hospitals' own patients: accuracy {own.mean:.3f} ± {own.interval or 0:.3f}")
    alone = sorted((train_alone(site, seed) for site in range(SITES)), key=lambda curve: curve[-1])
    return {
        "swarm": results[0]["curve"],
        "pooled": train_alone(None, seed),
        "best_alone": alone[-1],
        "worst_alone": alone[0],
        "replicas": [len({result["curve"][-1] for result in results})],
    }


if __name__ == "__main__":
    sites.main(__doc__ or "", train, [MANIFEST], SITES, compare, "AUC on 114 patients kept apart")
