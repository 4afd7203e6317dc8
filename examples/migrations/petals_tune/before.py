"""Tune prompts with Petals: python before.py MODEL /ip4/…/p2p/…"""

import sys

import torch
from petals import AutoDistributedModelForCausalLM
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

TEXT = "the quick brown fox jumps over the lazy dog"


def main() -> None:
    """Take thirty steps, and print the loss of each."""
    name, *peers = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokens = tokenizer([TEXT] * 4, return_tensors="pt")["input_ids"][:, :33]
    model = AutoDistributedModelForCausalLM.from_pretrained(
        name, initial_peers=peers, tuning_mode="ptune", pre_seq_len=16
    )
    opt = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(30):
        logits = model(tokens[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        print(f"round {step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
