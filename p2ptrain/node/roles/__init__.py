"""What a peer does: it trains, hosts stages, sends microbatches, or helps."""
