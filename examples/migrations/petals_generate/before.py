"""Continue a text with Petals: python before.py MODEL /ip4/…/p2p/…"""

import sys

from petals import AutoDistributedModelForCausalLM
from transformers import AutoTokenizer


def main() -> None:
    """Print the text and what follows."""
    name, *peers = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoDistributedModelForCausalLM.from_pretrained(name, initial_peers=peers)
    inputs = tokenizer("the quick brown fox", return_tensors="pt")["input_ids"]
    outputs = model.generate(inputs, max_new_tokens=20)
    print(tokenizer.decode(outputs[0]))


if __name__ == "__main__":
    main()
