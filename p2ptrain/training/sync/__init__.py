"""Synchronisation with the swarm: contribute, apply, catch up, download."""
