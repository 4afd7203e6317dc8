"""A plain loop with mixed precision, a schedule, a share of the data for each peer, and a script that resumes.

    python examples/loops/amp_loop.py --run-dir runs/first                  # starts a swarm and prints its link
    python examples/loops/amp_loop.py p2ptrain://… --run-dir runs/second    # joins it, on this or another machine

Kill one and start it again with the same ``--run-dir``: it goes on where the swarm is.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch.utils.data import DataLoader, TensorDataset

from p2ptrain import Manifest, SavePolicy, Swarm

ROUNDS = 6
BATCH = 32
MANIFEST = {
    "name": "spirals",
    "model": {"family": "custom"},
    "data": {"source": "custom"},
    "training": {"every": 8, "local_batch": BATCH, "outer": "average", "outer_learning_rate": 1.0},
}


def make_data() -> TensorDataset:
    """Points on two interleaved spirals and which spiral each is on; the same on every peer."""
    generator = torch.Generator().manual_seed(1)
    label = torch.randint(0, 2, (4096,), generator=generator)
    angle = 6.0 * torch.rand(len(label), generator=generator).sqrt()
    turn = angle + torch.pi * label
    return TensorDataset(torch.stack([angle * turn.cos(), angle * turn.sin()], dim=1) / 6.0, label)


def main() -> None:
    """Train until the swarm has reached `ROUNDS`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("link", nargs="?", help="of the swarm to join; starts one without it")
    parser.add_argument("--run-dir", help="where key and checkpoints are kept")
    parser.add_argument("--peers", type=int, default=1, help="train only while so many are there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    manifest = Manifest.model_validate({**MANIFEST, "averaging": {"min_peers": options.peers}})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2)).to(device)
    saving = SavePolicy(every_rounds=2)
    with (
        Swarm.join(options.link, run_dir=options.run_dir, saving=saving)
        if options.link
        else Swarm.create(manifest, run_dir=options.run_dir, saving=saving)
    ) as swarm:
        print(f"others join with: python examples/loops/amp_loop.py '{swarm.link}'", flush=True)
        data = make_data()
        loader = DataLoader(data, batch_size=BATCH, sampler=swarm.sampler(data), drop_last=True)
        opt = swarm.optimizer(
            model, torch.optim.AdamW(model.parameters(), 1e-2), samples_per_step=BATCH, tokens_per_step=BATCH,
            schedule=lambda round_: 0.5 + 0.5 * math.cos(math.pi * min(1.0, round_ / (2 * ROUNDS))),
        )  # fmt: skip
        scaler = torch.amp.GradScaler(device, init_scale=1024.0)
        while opt.round < ROUNDS:
            for points, label in loader:
                with torch.autocast(device, torch.bfloat16):
                    loss = torch.nn.functional.cross_entropy(model(points.to(device)).float(), label.to(device))
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                before = opt.round
                scaler.step(opt)  # A step that overflowed is left out, and counts for nothing.
                scaler.update()
                opt.zero_grad()
                opt.loss = loss.item()
                if opt.round != before:
                    members = opt.last_result.members if opt.last_result is not None else 0
                    print(f"round {opt.round}: loss {opt.loss:.3f}, {members} peers", flush=True)
                if opt.round >= ROUNDS:
                    break


if __name__ == "__main__":
    main()
