"""The training roles of a peer: trainer, stage host, sender of microbatches."""
