"""The text of a swarm, and the samples that each peer reads."""
