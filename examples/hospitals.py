"""Five hospitals train one classifier of tumours; no patient's record leaves its hospital.

    python examples/hospitals.py                       # all five on this machine, beside training on the pooled records
    python examples/hospitals.py --site 2 p2ptrain://… # one hospital of a swarm

The records are scikit-learn's breast cancer data (pip install scikit-learn): 30 measurements of 569 tumours. The
hospitals are of unequal size, and each sees another mix of benign and malignant ones. A fifth of all records is kept
apart to compare on.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import train_test_split

from p2ptrain import Manifest, Swarm, pooled

SITES = 5
ROUNDS = 20
EVERY = 10
MANIFEST = {
    "name": "hospitals",
    "model": {"family": "custom"},
    "data": {"source": "custom"},
    "training": {"every": EVERY, "local_batch": 16, "rounds": ROUNDS},
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
    chosen = torch.randint(len(records[0]), (16,))
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


def run_site(site: int, link: str | None, listen: str, seed: int) -> None:
    """Train as one hospital, and report how many of its own patients the model gets right."""
    own, apart = load(site, seed)
    num_held_out = max(1, len(own[0]) // 5)
    held_out, train = (own[0][:num_held_out], own[1][:num_held_out]), (own[0][num_held_out:], own[1][num_held_out:])
    model = make_model()
    manifest, where = Manifest.model_validate(MANIFEST), (listen,)
    with Swarm.join(link, listen=where) if link else Swarm.create(manifest, listen=where) as swarm:
        print(f"others join with: python {sys.argv[0]} --site N '{swarm.link}'", flush=True)
        inner = torch.optim.AdamW(model.parameters(), 3e-3)
        opt = swarm.optimizer(model, inner, tokens_per_step=16, site_samples=len(train[0]))
        while opt.round < ROUNDS:
            train_step(model, opt, train)
            right = (scores(model, held_out) > 0) == (held_out[1] > 0)
            opt.report(right.float().tolist(), "accuracy")
        print(f"site {site}: {len(train[0])} patients, AUC {auc(model, apart):.4f}", flush=True)
        if found := pooled(list(opt.evaluations().values())):
            print(f"on the hospitals' own patients: accuracy {found.mean:.3f} ± {found.interval or 0:.3f}", flush=True)


def run_all(seed: int) -> None:
    """Run all hospitals as processes of this machine; compare with a model of all records, and of one hospital's."""
    command = [sys.executable, __file__, "--seed", str(seed), "--listen", "/ip4/127.0.0.1/tcp/0", "--site"]
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
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
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
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.site is None:
        run_all(arguments.seed)
    else:
        run_site(arguments.site, arguments.link, arguments.listen, arguments.seed)


if __name__ == "__main__":
    main()
