"""Signed, bounded records that peers publish about themselves."""
