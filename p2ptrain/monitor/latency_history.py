"""Latencies in the history: histograms with fixed bounds, summed over each step.

Percentiles cannot be aggregated over time, so only counts are stored. The percentiles of a chart are computed from the
counts of each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from p2ptrain.network.records.serving import BOUNDS, Latencies

KINDS = ("first_token_seconds", "token_seconds")
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
PERCENTILES = {f"{kind}_{name}": (kind, share) for kind in KINDS for name, share in SHARES.items()}
"""Kind and quantile of each percentile series, by its name."""

SCHEMA = """
CREATE TABLE latencies (
    kind TEXT, step INTEGER, at INTEGER, bucket INTEGER, count INTEGER NOT NULL, PRIMARY KEY (kind, step, at, bucket)
) WITHOUT ROWID;
"""
ADD = "INSERT INTO latencies VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET count = count + excluded.count"


def rows(at: float, latencies: Mapping[str, Latencies], steps: Iterable[int]) -> list[tuple[str, int, int, int, int]]:
    """Return parameters of `ADD` for the latencies of second ``at``, by kind, for steps of ``steps`` seconds."""
    return [
        (kind, step, int(at) // step * step, bucket, count)
        for kind, each in latencies.items()
        for step in steps
        for bucket, count in enumerate(each.counts)
        if count
    ]


def query(names: Sequence[str]) -> tuple[str, list[str]]:
    """Return a query for the counts of percentile series, and its first parameters; step and start time follow."""
    kinds = sorted({PERCENTILES[name][0] for name in names})
    marks = ",".join("?" * len(kinds))
    return f"SELECT kind, at, bucket, count FROM latencies WHERE kind IN ({marks}) AND step = ? AND at >= ?", kinds


def points(names: Sequence[str], found: Iterable[Sequence[Any]]) -> list[tuple[str, int, float]]:
    """Return name, start of the step and value in seconds of each point, from the rows of `query`."""
    counts: dict[tuple[str, int], list[int]] = {}
    for kind, at, bucket, count in found:
        counts.setdefault((kind, at), [0] * (len(BOUNDS) + 1))[bucket] = count
    made = []
    for (kind, at), each in counts.items():
        latencies = Latencies(tuple(each))
        for name in names:
            of, share = PERCENTILES[name]
            if of == kind and (value := latencies.quantile(share)) is not None:
                made.append((name, at, value))
    return made
