"""Two spirals with p2ptrain: python after.py, and on another machine python after.py p2ptrain://…"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from p2ptrain import Manifest, Swarm

MANIFEST = {
    "name": "spirals",
    "model": {"family": "custom"},
    "data": {"source": "custom"},
    "training": {"every": 1, "local_batch": 32, "global_batch": 64},
    "averaging": {"codec": "fp32", "min_peers": 2},
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
    """Train for four passes over the data, and print the loss now and then."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(*spirals(2048))
    with Swarm.join(sys.argv[1]) if sys.argv[1:] else Swarm.create(Manifest.model_validate(MANIFEST)) as swarm:
        print("others join with: python after.py", swarm.link, flush=True)
        model = make_model()
        opt = swarm.optimizer(model, torch.optim.AdamW(model.parameters(), 1e-2))
        sampler = swarm.sampler(data)
        loader = DataLoader(data, batch_size=32, sampler=sampler)
        while opt.round < 128:
            for points, label in loader:
                loss = cross_entropy(model(points), label)
                loss.backward()
                opt.step()
                opt.zero_grad()
                if opt.round == 128:
                    break
            print(f"round {opt.round}: loss {loss.item():.3f}", flush=True)
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
