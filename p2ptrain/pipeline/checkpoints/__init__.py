"""Stage checkpoints: agreement on complete rounds, and joining into one model."""
