"""Checkpoints of stages: which belong together, and how they become one model."""
