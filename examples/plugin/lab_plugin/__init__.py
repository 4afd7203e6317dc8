"""A model family, a codec and an aggregation rule for p2ptrain."""
