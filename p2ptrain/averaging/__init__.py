"""Averaging: who averages with whom, butterfly all-reduce, and certificates that make a round binding.

Read `rally` (the policy), `matchmaking`, `butterfly`, `settle` in that order; `averager` ties them together.
"""
