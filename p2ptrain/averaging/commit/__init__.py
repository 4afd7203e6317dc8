"""Commit of a round: attempts, their recovery, the log of results, and their broadcast down the tree."""
