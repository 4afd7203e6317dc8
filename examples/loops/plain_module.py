"""Train a model that is no language model, in any number of processes.

    python examples/loops/plain_module.py                    # starts a swarm and prints its link
    python examples/loops/plain_module.py p2ptrain://…       # joins it, on this or another machine

The task: tell two interleaved spirals apart.
"""

from __future__ import annotations

import sys

import torch

from p2ptrain import Manifest, Swarm


def make_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on two spirals, shape ``[size, 2]``, and which spiral each is on, shape ``[size]``."""
    label = torch.randint(0, 2, (size,))
    angle = 6.0 * torch.rand(size).sqrt()
    turn = angle + torch.pi * label
    points = torch.stack([angle * turn.cos(), angle * turn.sin()], dim=1) / 6.0
    return points + 0.02 * torch.randn(size, 2), label


def main() -> None:
    """Train for twenty rounds and print the loss after each."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2)
    )
    manifest = Manifest.model_validate(
        {
            "name": "spirals",
            "model": {"family": "custom"},
            "data": {"source": "custom"},
            "training": {"every": 50, "local_batch": 64, "outer": "average", "outer_learning_rate": 1.0},
        }
    )
    with Swarm.join(sys.argv[1]) if len(sys.argv) > 1 else Swarm.create(manifest) as swarm:
        print(f"others join with: python {sys.argv[0]} '{swarm.link}'", flush=True)
        opt = swarm.optimizer(model, torch.optim.AdamW(model.parameters(), 1e-2), tokens_per_step=64)
        while opt.round < 20:
            points, label = make_batch(64)
            loss = torch.nn.functional.cross_entropy(model(points), label)
            loss.backward()  # type: ignore[no-untyped-call]
            before = opt.round
            opt.step()
            opt.zero_grad()
            if opt.round != before:
                result = opt.last_result
                members = result.members if result is not None else 0
                print(f"round {opt.round}: loss {loss.item():.3f}, {members} peers", flush=True)


if __name__ == "__main__":
    main()
