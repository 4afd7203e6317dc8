"""Averaging: groups, butterfly all-reduce, and certificates that make a round binding.

Read `grouping.pending_group` (the policy), `grouping.matchmaker`, `allreduce.session` and `commit.recovery` in that
order; `averager` connects them.
"""
