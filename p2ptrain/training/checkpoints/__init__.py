"""Checkpoints of what a peer trains."""
