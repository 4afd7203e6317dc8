"""Due times of rounds, timeouts, and keepalives."""
