"""Two spirals with p2ptrain: two sites, and no server.

python after.py 0
python after.py 1 p2ptrain://…
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from p2ptrain import Manifest, Swarm, pooled

ROUNDS = 10
MANIFEST = {
    "name": "spirals",
    "model": {"family": "custom"},
    "data": {"source": "custom"},
    "training": {"every": 20, "local_batch": 32},
    "averaging": {"codec": "fp32", "aggregation": "mean", "min_peers": 2},
    "private": {"weights": "samples"},
}


def spirals(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points on two spirals, ``[size, 2]``, and the spiral of each, ``[size]``."""
    label = torch.randint(0, 2, (size,))
    angle = 6.0 * torch.rand(size).sqrt()
    turn = angle + torch.pi * label
    return torch.stack([angle * turn.cos(), angle * turn.sin()], dim=1) / 6.0, label


def make_model() -> nn.Module:
    """Return a network that tells the spirals apart."""
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


def main() -> None:
    """Train as one site, with points of its own."""
    torch.set_num_threads(1)
    torch.manual_seed(int(sys.argv[1]))
    train, (points_apart, label_apart) = TensorDataset(*spirals(640)), spirals(128)
    model = make_model()
    with Swarm.join(sys.argv[2]) if sys.argv[2:] else Swarm.create(Manifest.model_validate(MANIFEST)) as swarm:
        print("the other joins with: python after.py 1", swarm.link, flush=True)
        inner = torch.optim.AdamW(model.parameters(), 1e-2)
        opt = swarm.optimizer(model, inner, site_samples=len(train))
        while opt.round < ROUNDS:
            for points, label in DataLoader(train, batch_size=32, shuffle=True):
                cross_entropy(model(points), label).backward()
                before = opt.round
                opt.step()
                opt.zero_grad()
                if opt.round != before:
                    with torch.no_grad():
                        apart = cross_entropy(model(points_apart), label_apart, reduction="none")
                    opt.report(apart.tolist())
                    if found := pooled(list(opt.evaluations().values())):
                        print(f"round {opt.round}: loss {found.mean:.3f}", flush=True)
                if opt.round == ROUNDS:
                    break


if __name__ == "__main__":
    main()
