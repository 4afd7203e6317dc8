"""Peers: `peer` composes one from its parts, `run` runs one from its role file, `swarm` is the API for scripts."""
