"""An accelerate loop with a swarm's optimizer and gradient accumulation: a small Llama learns to count.

python examples/loops/accelerate_loop.py                  # starts a swarm and prints its link
python examples/loops/accelerate_loop.py p2ptrain://…     # joins it, on this or another machine
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from p2ptrain import Manifest, Swarm

CONTEXT = 32
BATCH = 4
ACCUMULATE = 2
ROUNDS = 3
MANIFEST = {"name": "count", "model": {"family": "custom"}, "training": {"every": 8, "local_batch": BATCH * ACCUMULATE}}


def main() -> None:
    """Train until the swarm has reached `ROUNDS`."""
    torch.set_num_threads(1)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128)
    )
    data = TensorDataset((torch.arange(512)[:, None] * 7 + torch.arange(CONTEXT)) % 64)
    accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATE, cpu=not torch.cuda.is_available())
    with Swarm.join(sys.argv[1]) if len(sys.argv) > 1 else Swarm.create(Manifest.model_validate(MANIFEST)) as swarm:
        print(f"others join with: python {sys.argv[0]} '{swarm.link}'", flush=True)
        # First the model on its device, then the swarm's optimizer, which shares the model's parameters.
        prepared = accelerator.prepare_model(model)
        opt = swarm.optimizer(
            model, torch.optim.AdamW(model.parameters(), 3e-3), tokens_per_step=BATCH * ACCUMULATE * CONTEXT
        )
        loader = DataLoader(data, batch_size=BATCH, sampler=swarm.sampler(data), drop_last=True)
        optimizer, batches = accelerator.prepare(opt, loader)
        while opt.round < ROUNDS:
            for (tokens,) in batches:
                with accelerator.accumulate(prepared):
                    loss = prepared(input_ids=tokens, labels=tokens).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    before = opt.round
                    optimizer.step()
                    optimizer.zero_grad()
                if opt.round != before:
                    print(f"round {opt.round}: loss {opt.loss:.3f}", flush=True)
                if opt.round >= ROUNDS:
                    break


if __name__ == "__main__":
    main()
