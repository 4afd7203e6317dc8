"""Who averages with whom: membership, leaders, and the groups that they form."""
