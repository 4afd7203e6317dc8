"""What terminals and the status page show of a swarm: pure functions of what peers publish."""
