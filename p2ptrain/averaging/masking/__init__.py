"""Secure aggregation: masked contributions, of which a group learns the sum alone (Bonawitz et al., CCS 2017)."""
