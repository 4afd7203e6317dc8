"""Commands for swarms whose sites train on private data."""
