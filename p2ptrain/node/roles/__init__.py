"""The roles of a peer: it trains, hosts stages, sends microbatches, or helps."""
