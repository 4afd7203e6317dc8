"""A flat vector in shares: who reduces which, how contributions add up, and what lossy codecs drop."""
