"""Tune adapters with p2ptrain: python after.py MODEL p2ptrain://…"""

import sys

from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from p2ptrain import Swarm

TEXT = "the quick brown fox jumps over the lazy dog"


def main() -> None:
    """Take thirty steps, and print the loss of each."""
    name, link = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokens = tokenizer([TEXT] * 4, return_tensors="pt")["input_ids"][:, :33]
    with Swarm.join(link) as swarm:
        model = swarm.pipeline()
        for step in range(30):
            logits = model(tokens[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            print(f"round {step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
