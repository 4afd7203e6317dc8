"""Three machines train a small Llama on the sources of Python's standard library, byte by byte.

Each machine has a third of the files. Every tenth file is kept apart to compare on.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from examples import sites
from p2ptrain import Swarm

SITES, ROUNDS, EVERY, BATCH, CONTEXT = 3, 12, 16, 8, 128
MANIFEST = {
    "name": "language-model",
    "model": {"family": "custom", "context": CONTEXT},
    "data": {"source": "custom"},
    "training": {"every": EVERY, "local_batch": BATCH, "rounds": ROUNDS, "outer": "average"},
    "averaging": {"codec": "int8", "min_peers": SITES, "quorum": 1.0},
}


def load(site: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes that a machine trains on, or those of all machines for None, and the bytes kept apart."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    apart, rest = files[::10], [file for number, file in enumerate(files) if number % 10]
    chosen = rest if site is None else rest[site::SITES]
    joined = [bytearray(b"".join(file.read_bytes() for file in each)) for each in (chosen, apart)]
    return torch.frombuffer(joined[0], dtype=torch.uint8), torch.frombuffer(joined[1], dtype=torch.uint8)


def make_model(seed: int) -> torch.nn.Module:
    """Return a Llama of 0.5M parameters; all peers begin with the same weights."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=352)
    )


def windows(text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return pieces of the text, ``[starts, CONTEXT]``."""
    return torch.stack([text[start : start + CONTEXT] for start in starts]).long()


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, text: torch.Tensor, size: int = BATCH) -> None:
    """Take one step on so many random pieces."""
    batch = windows(text, torch.randint(0, len(text) - CONTEXT, (size,)))
    model(input_ids=batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def held_out(model: torch.nn.Module, text: torch.Tensor) -> float:
    """Return the loss on 64 pieces that are always the same, in nats a byte."""
    batch = windows(text, torch.linspace(0, len(text) - CONTEXT - 1, 64).long())
    return float(model(input_ids=batch, labels=batch).loss)


def train(swarm: Swarm, site: int, seed: int) -> list[float]:
    """Train as one machine; return the held-out loss after each round."""
    text, apart = load(site)
    model, curve = make_model(seed), []
    torch.manual_seed(seed + site)
    opt = swarm.optimizer(model, torch.optim.AdamW(model.parameters(), 3e-3), tokens_per_step=BATCH * CONTEXT)
    while opt.round < ROUNDS:
        before = opt.round
        train_step(model, opt, text)
        if opt.round != before:
            curve.append(held_out(model, apart))
    return curve


def train_alone(site: int | None, seed: int, size: int = BATCH) -> list[float]:
    """Return the held-out loss after each round's number of steps of one machine on batches of so many pieces."""
    text, apart = load(site)
    model, curve = make_model(seed), []
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(ROUNDS * EVERY):
        train_step(model, optimizer, text, size)
        if (step + 1) % EVERY == 0:
            curve.append(held_out(model, apart))
    return curve


def compare(found: dict[str, list[Any]], seed: int) -> sites.Curves:
    """Return the held-out loss of the swarm, and of one machine after as many steps."""
    tasks = [(None, seed, SITES * BATCH), (None, seed), (0, seed)]
    batches_of_all, one_machine, a_third = sites.in_parallel(train_alone, tasks)
    return {
        "swarm": found["language-model"][0],
        "one_machine": one_machine,
        "one_machine_a_third_of_the_files": a_third,
        "one_machine_batches_of_all": batches_of_all,
        "replicas": [len({curve[-1] for curve in found["language-model"]})],
    }


if __name__ == "__main__":
    sites.main(__doc__ or "", train, [MANIFEST], SITES, compare, "held-out loss [nats a byte]")
