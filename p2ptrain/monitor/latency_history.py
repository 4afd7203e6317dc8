"""Latencies in the history: counts between fixed bounds, which are added up in each step, whatever its length.

A percentile of an hour is none of the percentiles of its minutes, nor their mean. So no percentile is kept: those that
a chart shows are taken from the counts of each of its steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from p2ptrain.network.records.serving import BOUNDS, Latencies

KINDS = ("first_token_seconds", "token_seconds")
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
PERCENTILES = {f"{kind}_{name}": (kind, share) for kind in KINDS for name, share in SHARES.items()}
"""Series that are made of them: of which kind, and which share of the counts is below."""

SCHEMA = """
CREATE TABLE latencies (
    kind TEXT, step INTEGER, at INTEGER, bucket INTEGER, count INTEGER NOT NULL, PRIMARY KEY (kind, step, at, bucket)
) WITHOUT ROWID;
"""
ADD = "INSERT INTO latencies VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET count = count + excluded.count"
PRUNE = "DELETE FROM latencies WHERE step = ? AND at < ?"


def rows(at: float, latencies: Mapping[str, Latencies], steps: Iterable[int]) -> list[tuple[str, int, int, int, int]]:
    """Return parameters of `ADD`: the latencies of second ``at``, by kind, for steps of these lengths in seconds."""
    return [
        (kind, step, int(at) // step * step, bucket, count)
        for kind, each in latencies.items()
        for step in steps
        for bucket, count in enumerate(each.counts)
        if count
    ]


def query(names: Sequence[str]) -> tuple[str, list[str]]:
    """Return a query for the counts of some series, in steps of ``?`` seconds from second ``?`` on.

    Returns:
        The statement, and the parameters before these two.
    """
    kinds = sorted({PERCENTILES[name][0] for name in names})
    marks = ",".join("?" * len(kinds))
    return f"SELECT kind, at, bucket, count FROM latencies WHERE kind IN ({marks}) AND step = ? AND at >= ?", kinds


def points(names: Sequence[str], found: Iterable[Sequence[Any]]) -> list[tuple[str, int, float]]:
    """Return values of these series in seconds, each with its name and step, from the rows of `query`."""
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
