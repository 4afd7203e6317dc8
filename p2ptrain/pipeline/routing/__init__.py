"""Microbatch routing: selection of hosts, and delivery to them."""
