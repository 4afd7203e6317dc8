"""When a round is due, how long to wait, and signs of life."""
