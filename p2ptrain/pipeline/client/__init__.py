"""A trainer's side of a pipeline."""
