"""How others reach this peer, directly or through a relay."""
