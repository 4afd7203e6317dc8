"""Continue a text with p2ptrain: python after.py p2ptrain://…"""

import sys

from p2ptrain import Swarm


def main() -> None:
    """Print the text and what follows."""
    with Swarm.join(sys.argv[1]) as swarm:
        model = swarm.language_model()
        inputs = model.tokenizer("the quick brown fox", return_tensors="pt")["input_ids"]
        outputs = model.generate(inputs, max_new_tokens=20)
        print(model.tokenizer.decode(outputs[0]))


if __name__ == "__main__":
    main()
