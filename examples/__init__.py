"""Examples: each folder with a `train.py` is held to its result by `tests/swarm/test_examples.py`."""
