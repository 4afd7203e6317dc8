"""Signed values of a group: heads, rosters, results and their certificates."""
