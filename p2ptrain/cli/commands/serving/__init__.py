"""Commands that generate with a swarm's model."""
