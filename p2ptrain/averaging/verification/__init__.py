"""Spot checks of means, and evidence against owners that falsify them."""
