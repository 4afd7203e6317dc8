"""What members of a group sign: heads, rosters, results and their certificates."""
