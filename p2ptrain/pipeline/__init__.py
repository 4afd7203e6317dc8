"""Pipeline stages: which blocks each has, which hosts a microbatch passes, and who hosts what."""
