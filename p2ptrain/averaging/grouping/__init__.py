"""Matchmaking: membership, leaders, and the groups of each round."""
