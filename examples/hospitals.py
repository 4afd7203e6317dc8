"""Five hospitals train one classifier of tumours; no patient's record leaves its hospital.

    python examples/hospitals.py                       # all five on this machine, beside training on the pooled records
    python examples/hospitals.py --epsilon 8           # the same with differential privacy of each patient
    python examples/hospitals.py --site 2 p2ptrain://… # one hospital of a swarm

The records are scikit-learn's breast cancer data (pip install scikit-learn): 30 measurements of 569 tumours. The
hospitals are of unequal size, and each sees another mix of benign and malignant ones. A fifth of all records is kept
apart to compare on.

With differential privacy (pip install 'p2ptrain[privacy]') the model is linear, and normalises nothing: statistics of
patients would leave beside what the bound covers. Each measurement is divided by a power of ten of its unit instead.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split

from p2ptrain import Manifest, Swarm, pooled
from p2ptrain.training.optimizer import SwarmOptimizer

SITES = 5
ROUNDS = 20
EVERY = 10
MANIFEST: dict[str, Any] = {
    "name": "hospitals",
    "model": {"family": "custom"},
    "data": {"source": "custom"},
    "training": {"every": EVERY, "local_batch": 16, "rounds": ROUNDS},
    "averaging": {"codec": "fp32", "aggregation": "mean", "min_peers": SITES, "quorum": 1.0},
    "private": {"weights": "samples", "proximal": 0.01},
}
DELTA = 1e-3
NOISE_MULTIPLIER = 2.0
MAGNITUDES = torch.tensor([
    10, 10, 100, 1000, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1,
    1, 1, 1, 10, 0.01, 0.01, 0.01, 0.01, 0.01, 0.001,
    10, 10, 100, 1000, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1,
])  # fmt: skip
"""Powers of ten for radius, texture, perimeter, area, smoothness, …: their means, standard errors and worst values."""
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


class ByMagnitude(torch.nn.Module):
    """Scales measurements by constants that no patient changes."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return (values / MAGNITUDES - 1).clamp(-3, 3)


def make_model(*, is_private: bool) -> torch.nn.Module:
    """Return a classifier that normalises what it reads: the statistics are averaged as the weights are.

    For differential privacy, return a linear one on measurements ``ByMagnitude``.
    """
    torch.manual_seed(0)
    if is_private:
        return torch.nn.Sequential(ByMagnitude(), torch.nn.Linear(30, 1), torch.nn.Flatten(0))
    return torch.nn.Sequential(
        torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1), torch.nn.Flatten(0)
    )


def make_optimizer(model: torch.nn.Module, *, is_private: bool) -> torch.optim.Optimizer:
    """Return the optimizer of local steps; moments of Adam would be those of noise."""
    return torch.optim.SGD(model.parameters(), 0.3) if is_private else torch.optim.AdamW(model.parameters(), 3e-3)


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, records: Records, chosen: list[int] | None = None
) -> None:
    """Take one step on the patients ``chosen``, else on a batch of random ones."""
    model.train()
    chosen = torch.randint(len(records[0]), (16,)).tolist() if chosen is None else chosen
    loss = torch.nn.functional.binary_cross_entropy_with_logits(model(records[0][chosen]), records[1][chosen])
    loss.backward()  # type: ignore[no-untyped-call]
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


def wait_for_all(opt: SwarmOptimizer) -> None:
    """Return once each hospital has reported: one that began alone would spend its budget without the others."""
    while len(opt.evaluations()) < SITES:
        time.sleep(0.2)


def is_over(opt: SwarmOptimizer) -> bool:
    """True after the last round, or if this hospital's budget is spent and nobody is left to follow."""
    return opt.round >= ROUNDS or (opt.is_spent and not opt.others_train)


def drawn(swarm: Swarm, train: Records) -> Iterator[list[int]]:
    """Yield the patients of one private step after another."""
    batches = swarm.batches(train[0])
    while True:
        yield from batches


def run_site(site: int, link: str | None, listen: str, seed: int, epsilon: float) -> None:
    """Train as one hospital, and report how many of its own patients the model gets right.

    ``epsilon`` is 0 without differential privacy.
    """
    own, apart = load(site, seed)
    num_held_out = max(1, len(own[0]) // 5)
    held_out, train = (own[0][:num_held_out], own[1][:num_held_out]), (own[0][num_held_out:], own[1][num_held_out:])
    is_private, where = epsilon > 0, (listen,)
    model = make_model(is_private=is_private)

    def report() -> None:
        right = (scores(model, held_out) > 0) == (held_out[1] > 0)
        opt.report(right.float().tolist(), "accuracy")

    with (
        tempfile.TemporaryDirectory() as run_dir,
        Swarm.join(link, run_dir=run_dir, listen=where) if link
        else Swarm.create(make_manifest(epsilon), run_dir=run_dir, listen=where) as swarm,
    ):  # fmt: skip
        print(f"others join with: python {sys.argv[0]} --site N '{swarm.link}'", flush=True)
        inner = make_optimizer(model, is_private=is_private)
        opt = swarm.optimizer(model, inner, tokens_per_step=16, site_samples=len(train[0]))
        batches = drawn(swarm, train) if is_private else None
        if is_private:
            report()
            wait_for_all(opt)
        while not is_over(opt):
            train_step(model, opt, train, next(batches) if batches else None)
            report()
        spent = f", {opt.privacy}" if opt.privacy else ""
        print(f"site {site}: {len(train[0])} patients, AUC {auc(model, apart):.4f}{spent}", flush=True)
        if found := pooled(list(opt.evaluations().values())):
            print(f"on the hospitals' own patients: accuracy {found.mean:.3f} ± {found.interval or 0:.3f}", flush=True)


def make_manifest(epsilon: float) -> Manifest:
    """Return the swarm's manifest; with ``epsilon`` above 0 a hospital that has spent its budget is not waited for."""
    if not epsilon:
        return Manifest.model_validate(MANIFEST)
    privacy = {"epsilon": epsilon, "delta": DELTA, "noise_multiplier": NOISE_MULTIPLIER}
    averaging = {**MANIFEST["averaging"], "min_peers": 1}
    return Manifest.model_validate({**MANIFEST, "averaging": averaging, "differential_privacy": privacy})


def run_all(seed: int, epsilon: float) -> None:
    """Run all hospitals as processes of this machine; compare with a model of all records, and of one hospital's.

    The models that these compare with are the same, but trained without noise.
    """
    command = [
        sys.executable, __file__, "--seed", str(seed), "--epsilon", str(epsilon), "--listen", "/ip4/127.0.0.1/tcp/0",
        "--site",
    ]  # fmt: skip
    first = subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    link = next(found[0] for line in first.stdout if (found := re.search(r"p2ptrain://[^']+", line)))
    others = [
        subprocess.Popen([*command, str(site), link], stdout=subprocess.PIPE, text=True) for site in range(1, SITES)
    ]
    together = [line for process in (first, *others) for line in process.communicate()[0].splitlines() if "AUC" in line]
    print("\n".join(together))
    alone = {}
    for site in (*range(SITES), None):
        train, apart = load(site, seed)
        model = make_model(is_private=epsilon > 0)
        optimizer = make_optimizer(model, is_private=epsilon > 0)
        for _ in range(ROUNDS * EVERY):
            train_step(model, optimizer, train)
        alone[site] = auc(model, apart)
    pool = alone.pop(None)
    print(f"each alone: AUC {min(alone.values()):.4f} to {max(alone.values()):.4f}; all records pooled: {pool:.4f}")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("link", nargs="?", help="the swarm link; without one, --site starts a swarm")
    parser.add_argument("--site", type=int, choices=range(SITES), help="be this hospital; without it, run all of them")
    parser.add_argument("--listen", default="/ip4/0.0.0.0/tcp/0", help="multiaddr of --site to listen on")
    parser.add_argument("--seed", type=int, default=1, help="of the division of the records")
    parser.add_argument("--epsilon", type=float, default=0.0, help="of differential privacy; 0 for none")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.site is None:
        run_all(arguments.seed, arguments.epsilon)
    else:
        run_site(arguments.site, arguments.link, arguments.listen, arguments.seed, arguments.epsilon)


if __name__ == "__main__":
    main()
