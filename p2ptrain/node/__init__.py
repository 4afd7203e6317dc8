"""A peer put together from its parts: `peer` composes one, `run` runs it from its role file, `swarm` is for scripts."""
