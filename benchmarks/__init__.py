"""Benchmarks: each `bench_*.py` prints figures measured side by side in one run."""
