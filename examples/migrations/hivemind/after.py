"""Two spirals with p2ptrain, in any number of processes.

python after.py                            # starts, and prints how others join
python after.py p2ptrain://…
"""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from p2ptrain import Manifest, Swarm

MANIFEST = {
    "name": "spirals",
    "model": {"family": "custom"},
    "data": {"source": "custom"},
    "training": {"every": 1, "local_batch": 32, "global_batch": 512},
    "averaging": {"codec": "fp16", "matchmaking_seconds": 2.0, "round_seconds": 10.0},
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
    """Train for twenty rounds, and print the loss after each."""
    torch.set_num_threads(1)
    model = make_model()
    with Swarm.join(sys.argv[1]) if sys.argv[1:] else Swarm.create(Manifest.model_validate(MANIFEST)) as swarm:
        print("others join with: python after.py", swarm.link, flush=True)
        opt = swarm.optimizer(
            model,
            torch.optim.AdamW(model.parameters(), 1e-2),
            schedule=lambda round_: 0.98**round_,
        )
        while opt.round < 20:
            points, label = spirals(32)
            loss = cross_entropy(model(points), label)
            loss.backward()
            before = opt.round
            opt.step()
            opt.zero_grad()
            if opt.round != before:
                print(f"round {opt.round}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
