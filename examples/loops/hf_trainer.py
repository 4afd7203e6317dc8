"""Hugging Face's Trainer with a swarm's optimizer: a small Llama on the Python standard library's sources.

python examples/loops/hf_trainer.py                  # starts a swarm and prints its link
python examples/loops/hf_trainer.py p2ptrain://…     # joins it, on this or another machine
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from p2ptrain import Manifest, Swarm

CONTEXT = 64
BATCH = 4
STEPS = 24
MANIFEST = {"name": "hf-trainer", "model": {"family": "custom"}, "training": {"every": 8, "local_batch": BATCH}}


class Windows(Dataset[dict[str, torch.Tensor]]):
    """The text in windows of `CONTEXT` bytes; the same on every peer."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
        self.text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.text) // CONTEXT

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.text[index * CONTEXT : (index + 1) * CONTEXT].long()
        return {"input_ids": window, "labels": window}


class SwarmTrainer(Trainer):
    """A `Trainer` that reads this peer's share of the data."""

    def __init__(self, swarm: Swarm, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.swarm = swarm

    def get_train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        """See `Trainer`."""
        data = self.train_dataset
        assert isinstance(data, Windows)
        return DataLoader(data, batch_size=BATCH, sampler=self.swarm.sampler(data), drop_last=True)


def main() -> None:
    """Train for `STEPS` steps."""
    torch.set_num_threads(1)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=256, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128)
    )
    with Swarm.join(sys.argv[1]) if len(sys.argv) > 1 else Swarm.create(Manifest.model_validate(MANIFEST)) as swarm:
        print(f"others join with: python {sys.argv[0]} '{swarm.link}'", flush=True)
        opt = swarm.optimizer(
            model, torch.optim.AdamW(model.parameters(), 3e-3), tokens_per_step=BATCH * CONTEXT,
            schedule=lambda round_: 1.0 / (1 + 0.1 * round_),
        )  # fmt: skip
        arguments = TrainingArguments(
            output_dir="runs/hf-trainer", max_steps=STEPS, per_device_train_batch_size=BATCH, logging_steps=8,
            save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        trainer = SwarmTrainer(
            swarm, model=model, args=arguments, train_dataset=Windows(), optimizers=(opt, opt.scheduler())
        )
        trainer.train()
        print(f"round {opt.round}: loss {opt.loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
