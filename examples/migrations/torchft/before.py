"""Two spirals with torchft; each replica group is one process.

torchft_lighthouse --min_replicas 1 --join_timeout_ms 10000
REPLICA_GROUP_ID=0 TORCHFT_LIGHTHOUSE=http://localhost:29510 torchrun --nproc-per-node 1 before.py
REPLICA_GROUP_ID=1 TORCHFT_LIGHTHOUSE=http://localhost:29510 torchrun --nproc-per-node 1 --master-port 29600 before.py
"""

import os
from datetime import timedelta

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

GROUP = int(os.environ["REPLICA_GROUP_ID"])


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
    """Train for 500 steps, and print the loss now and then."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(*spirals(2048))
    model = make_model()
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        replica_id=f"spirals_{GROUP}",
        timeout=timedelta(seconds=10),
        state_dict=lambda: {"model": model.state_dict(), "optim": opt.state_dict()},
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), opt.load_state_dict(state["optim"])),
    )
    wrapped = DistributedDataParallel(manager, model)
    opt = Optimizer(manager, torch.optim.AdamW(model.parameters(), 1e-2))
    sampler = DistributedSampler(
        data, replica_group_id=GROUP, num_replica_groups=2, group_rank=0, num_replicas=1, shuffle=True
    )
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    while manager.current_step() < 500:
        for points, label in loader:
            opt.zero_grad()
            loss = cross_entropy(wrapped(points), label)
            loss.backward()
            opt.step()
        print(f"round {manager.current_step()}: loss {loss.item():.3f}", flush=True)
    manager.shutdown()


if __name__ == "__main__":
    main()
