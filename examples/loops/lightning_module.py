"""A Lightning module with a swarm's optimizer: tell two interleaved spirals apart. Needs ``pytorch-lightning``.

python examples/loops/lightning_module.py                  # starts a swarm and prints its link
python examples/loops/lightning_module.py p2ptrain://…     # joins it, on this or another machine
"""

from __future__ import annotations

import sys

import pytorch_lightning as lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from p2ptrain import Manifest, Swarm

BATCH = 32
STEPS = 24
MANIFEST = {
    "name": "spirals",
    "model": {"family": "custom"},
    "data": {"source": "custom"},
    "training": {"every": 8, "local_batch": BATCH, "outer": "average", "outer_learning_rate": 1.0},
}


class Spirals(lightning.LightningModule):
    """A classifier; its optimizer is the swarm's."""

    def __init__(self, swarm: Swarm) -> None:
        super().__init__()
        self.swarm = swarm
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        """The loss of one batch, which the swarm's optimizer sees, too."""
        points, label = batch
        return torch.nn.functional.cross_entropy(self.layers(points), label)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The module is on its device by now."""
        opt: torch.optim.Optimizer = self.swarm.optimizer(
            self, torch.optim.AdamW(self.parameters(), 1e-2), tokens_per_step=BATCH
        )
        return opt


def main() -> None:
    """Train for `STEPS` steps."""
    torch.set_num_threads(1)
    label = torch.randint(0, 2, (4096,), generator=torch.Generator().manual_seed(1))
    angle = 6.0 * torch.linspace(0, 1, len(label)).sqrt()
    turn = angle + torch.pi * label
    data = TensorDataset(torch.stack([angle * turn.cos(), angle * turn.sin()], dim=1) / 6.0, label)
    with Swarm.join(sys.argv[1]) if len(sys.argv) > 1 else Swarm.create(Manifest.model_validate(MANIFEST)) as swarm:
        print(f"others join with: python {sys.argv[0]} '{swarm.link}'", flush=True)
        loader = DataLoader(data, batch_size=BATCH, sampler=swarm.sampler(data), drop_last=True)
        module = Spirals(swarm)
        trainer = lightning.Trainer(
            max_steps=STEPS, accelerator="auto", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(module, loader)
        opt = trainer.optimizers[0]
        print(f"round {opt.round}: loss {opt.loss:.3f}", flush=True)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
