"""Which hosts a microbatch passes, and how it gets there."""
