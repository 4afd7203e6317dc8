"""Auxiliaries: peers without a model that lend their bandwidth."""
