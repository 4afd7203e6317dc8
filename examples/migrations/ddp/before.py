"""Two spirals with DistributedDataParallel: torchrun --nproc-per-node 2 before.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


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
    """Train for four epochs, and print the loss after each."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = TensorDataset(*spirals(2048))
    dist.init_process_group("gloo")
    model = DistributedDataParallel(make_model())
    opt = torch.optim.AdamW(model.parameters(), 1e-2)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for points, label in loader:
            loss = cross_entropy(model(points), label)
            loss.backward()
            opt.step()
            opt.zero_grad()
        if dist.get_rank() == 0:
            print(f"round {epoch}: loss {loss.item():.3f}", flush=True)
            torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
