"""Checkpoints of a peer's training."""
