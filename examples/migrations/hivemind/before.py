"""Two spirals with hivemind.Optimizer, in any number of processes.

python before.py                            # starts, and prints how others join
python before.py /ip4/127.0.0.1/tcp/…/p2p/…
"""

import sys

import hivemind
import torch
from torch import nn
from torch.nn.functional import cross_entropy


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
    """Train for twenty epochs, and print the loss after each."""
    torch.set_num_threads(1)
    model = make_model()
    dht = hivemind.DHT(initial_peers=sys.argv[1:], start=True, nat_port_map=False)
    print("others join with: python before.py", *dht.get_visible_maddrs(), flush=True)
    opt = hivemind.Optimizer(
        dht=dht,
        run_id="spirals",
        batch_size_per_step=32,
        target_batch_size=512,
        params=model.parameters(),
        optimizer=lambda params: torch.optim.AdamW(params, 1e-2),
        scheduler=lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 0.98**epoch),
        matchmaking_time=2.0,
        averaging_timeout=10.0,
        grad_compression=hivemind.compression.Float16Compression(),
    )
    opt.load_state_from_peers()
    while opt.local_epoch < 20:
        points, label = spirals(32)
        loss = cross_entropy(model(points), label)
        loss.backward()
        before = opt.local_epoch
        opt.step()
        opt.zero_grad()
        if opt.local_epoch != before:
            print(f"round {opt.local_epoch}: loss {loss.item():.3f}", flush=True)
    opt.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()
