"""The route of a microbatch: drawing hosts, and sending to them."""
