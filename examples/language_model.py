"""Three lines added to an ordinary training script: a small Llama on the Python standard library's sources.

python examples/language_model.py                  # starts a swarm and prints its link
python examples/language_model.py p2ptrain://…     # joins it, on this or another machine
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from p2ptrain import Manifest, Swarm

CONTEXT = 128
BATCH = 8


def main() -> None:
    """Train for ten rounds."""
    torch.set_num_threads(1)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=352)
    )
    torch.seed()
    manifest = Manifest.model_validate(
        {"name": "example", "model": {"family": "custom"}, "training": {"every": 16, "local_batch": BATCH}}
    )
    with Swarm.join(sys.argv[1]) if len(sys.argv) > 1 else Swarm.create(manifest) as swarm:
        print(f"others join with: python {sys.argv[0]} '{swarm.link}'", flush=True)
        opt = swarm.optimizer(model, torch.optim.AdamW(model.parameters(), 2e-3), tokens_per_step=BATCH * CONTEXT)
        while opt.round < 10:
            starts = torch.randint(0, len(text) - CONTEXT, (BATCH,))
            batch = torch.stack([text[start : start + CONTEXT] for start in starts]).long()
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            before = opt.round
            opt.step()
            opt.zero_grad()
            if opt.round != before:
                print(f"round {opt.round}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
