"""A site of a private swarm: its weight, its differential privacy, and the correction of its drift."""
