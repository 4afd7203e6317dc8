"""Spot checks of what members reduce, and evidence against those that lie."""
