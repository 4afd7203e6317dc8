"""NAT traversal: reachability probes, relays and hole punching."""
