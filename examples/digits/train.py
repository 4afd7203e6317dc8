"""Four sites learn to read digits from unlike pictures: a small ResNet, then a small ViT.

The pictures are scikit-learn's digits: 1,797 of 8 by 8 pixels, written by hand. That is not MNIST, and far smaller. The
sites are of unequal size, and each sees other digits: a Dirichlet draw (0.3) divides each digit among them. A fifth of
the pictures is kept apart to compare on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from examples import sites
from p2ptrain import Swarm

SITES, ROUNDS, EVERY, BATCH, UNLIKE = 4, 40, 8, 32, 0.3
MANIFESTS = [
    {
        "name": name,
        "model": {"family": "custom"},
        "data": {"source": "custom"},
        "training": {"every": EVERY, "local_batch": BATCH, "rounds": ROUNDS},
        "averaging": {"codec": "int8", "aggregation": "mean", "min_peers": SITES, "quorum": 1.0},
        "private": {"weights": "samples"},
    }
    for name in ("resnet", "vit")
]
Pictures = tuple[torch.Tensor, torch.Tensor]
"""Grey values from 0 to 1, ``[pictures, 1, 8, 8]``, and digits, ``[pictures]``."""


def load(site: int | None, seed: int) -> tuple[Pictures, Pictures]:
    """Return the pictures of one site, or of all for None, and the pictures kept apart."""
    values, digits = load_digits(return_X_y=True)
    x, apart_x, y, apart_y = train_test_split(values / 16, digits, test_size=0.2, stratify=digits, random_state=seed)
    if site is not None:
        draws = np.random.default_rng(seed)
        owner = np.empty(len(y), dtype=int)
        for digit in range(10):
            order = draws.permutation(np.flatnonzero(y == digit))
            borders = (np.cumsum(draws.dirichlet([UNLIKE] * SITES))[:-1] * len(order)).astype(int)
            for number, part in enumerate(np.split(order, borders)):
                owner[part] = number
        x, y = x[owner == site], y[owner == site]
    x, y, apart_x, apart_y = map(torch.from_numpy, (x, y, apart_x, apart_y))
    return (x.float().view(-1, 1, 8, 8), y), (apart_x.float().view(-1, 1, 8, 8), apart_y)


class Residual(nn.Module):
    """Two convolutions beside a shortcut. Groups are normalised, not batches: a site's batches are unlike others'."""

    def __init__(self, width: int) -> None:
        """Take so many channels, and return as many."""
        super().__init__()
        layers = [(nn.GroupNorm(4, width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(2)]
        self.inside = nn.Sequential(*layers[0], *layers[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[pictures, width, height, breadth]`` to the same shape."""
        summed: torch.Tensor = x + self.inside(x)
        return summed


class ViT(nn.Module):
    """A transformer of 16 patches, 2 by 2 pixels each."""

    def __init__(self, width: int = 32) -> None:
        """Make two layers of so many features."""
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.places = nn.Parameter(0.02 * torch.randn(16, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[pictures, 1, 8, 8]`` to logits ``[pictures, 10]``."""
        logits: torch.Tensor = self.head(self.layers(self.patches(x).flatten(2).mT + self.places).mean(1))
        return logits


def make_model(name: str) -> nn.Module:
    """Return a model; all peers begin with the same weights."""
    torch.manual_seed(0)
    if name == "vit":
        return ViT()
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), Residual(16), nn.Conv2d(16, 32, 3, 2, 1), Residual(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, pictures: Pictures, size: int) -> None:
    """Take one step on so many random pictures."""
    chosen = torch.randint(len(pictures[0]), (size,))
    nn.functional.cross_entropy(model(pictures[0][chosen]), pictures[1][chosen]).backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def accuracy(model: nn.Module, pictures: Pictures) -> float:
    """Return the share of digits that the model reads."""
    return float((model(pictures[0]).argmax(1) == pictures[1]).float().mean())


def train(swarm: Swarm, site: int, seed: int) -> dict[str, Any]:
    """Train the model that the swarm is named after, as one site; return its accuracy after each round."""
    own, apart = load(site, seed)
    model, curve = make_model(swarm.manifest.name), []
    torch.manual_seed(seed + site)
    inner = torch.optim.AdamW(model.parameters(), 3e-3)
    opt = swarm.optimizer(model, inner, tokens_per_step=BATCH, site_samples=len(own[0]))
    while opt.round < ROUNDS:
        before = opt.round
        train_step(model, opt, own, BATCH)
        if opt.round != before:
            curve.append(accuracy(model, apart))
    return {"curve": curve, "digits": torch.bincount(own[1], minlength=10).tolist()}


def train_alone(name: str, site: int | None, seed: int) -> list[float]:
    """Return the accuracy after each round's steps on one site's pictures, or, for None, on batches of all sites'."""
    pictures, apart = load(site, seed)
    model, curve = make_model(name), []
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(ROUNDS * EVERY):
        train_step(model, optimizer, pictures, BATCH if site is not None else SITES * BATCH)
        if (step + 1) % EVERY == 0:
            curve.append(accuracy(model, apart))
    return curve


def compare(found: dict[str, list[Any]], seed: int) -> sites.Curves:
    """Return the accuracy on the pictures kept apart: of the swarm, of one machine, and of the best site alone."""
    for site, result in enumerate(found["vit"]):
        print(f"site {site}: {sum(result['digits'])} pictures, of each digit {result['digits']}")
    curves: sites.Curves = {}
    for name, results in found.items():
        pooled, *alone = sites.in_parallel(train_alone, [(name, site, seed) for site in (None, *range(SITES))])
        curves |= {
            f"{name}_swarm": results[0]["curve"],
            f"{name}_pooled": pooled,
            f"{name}_best_alone": max(alone, key=lambda curve: curve[-1]),
            f"{name}_replicas": [len({result["curve"][-1] for result in results})],
        }
    return curves


if __name__ == "__main__":
    sites.main(__doc__ or "", train, MANIFESTS, SITES, compare, "accuracy on 360 pictures kept apart")
