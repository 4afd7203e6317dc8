"""Numbers as text, for the page and terminals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from p2ptrain.network.records.evaluation import Evaluation

LAST_SECOND = 253_402_300_799.0
"""The last second that `datetime` can represent, in the year 9999."""


def human_bytes(number: float) -> str:
    """Return bytes in powers of ten with three digits: ``0 B``, ``1.5 kB``, ``12.3 MB``."""
    return _scaled(number, (" B", " kB", " MB", " GB", " TB"))


def human_count(number: float) -> str:
    """Return a number with three digits: ``940``, ``12.3k``, ``1.2M``."""
    return _scaled(number, ("", "k", "M", "B", "T"))


def _scaled(number: float, units: Sequence[str]) -> str:
    """Return a number with the unit, of ascending powers of 1000, that leaves at most three digits before the point."""
    for power, unit in enumerate(units[:-1]):
        if number < 999.5:
            return f"{number:.0f}{unit}" if not power or number >= 99.95 else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}{units[-1]}"


def human_seconds(seconds: float) -> str:
    """Return a duration with two digits: ``0.4 s``, ``12 s``, ``3 min``, ``2.5 h``, ``4 days``."""
    if seconds < 90:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def human_latency(seconds: float) -> str:
    """Return a duration down to milliseconds: ``3.4 ms``, ``34 ms``, ``0.34 s``, then as `human_seconds`."""
    if seconds < 0.00005:
        return "0 s"
    if seconds < 0.0995:
        return f"{1000 * seconds:.1f} ms" if seconds < 0.00995 else f"{1000 * seconds:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 0.995 else human_seconds(seconds)


def utc(at: float) -> str:
    """Format a wall-clock second as ``2026-11-22 05:40:00 UTC``."""
    return _moment(at).strftime("%Y-%m-%d %H:%M:%S UTC")


def iso(at: float) -> str:
    """Format a wall-clock second as ISO 8601."""
    return _moment(at).isoformat(timespec="seconds")


def _moment(at: float) -> datetime:
    """Return the UTC time of a wall-clock second, clamped to `datetime`'s range: peers may claim any."""
    return datetime.fromtimestamp(min(max(at, 0.0), LAST_SECOND), UTC)


def short_id(peer: str) -> str:
    """Return the end of a peer id, where ids differ."""
    return f"…{peer[-8:]}" if len(peer) > 10 else peer


def human_loss(loss: float | None) -> str:
    """Return a loss in nats: ``2.345``; ``?`` if unknown."""
    return "?" if loss is None else f"{loss:.3f}"


def human_evaluation(evaluation: Evaluation) -> str:
    """Return a measurement with its 95 % interval: ``accuracy 0.912 ± 0.021``."""
    interval = "" if evaluation.interval is None else f" ± {evaluation.interval:.3f}"
    return f"{evaluation.metric} {evaluation.mean:.3f}{interval}"


def human_hash(value: bytes) -> str:
    """Return a hash in hexadecimal; empty for zeros, which mean none."""
    return value.hex() if any(value) else ""


FILTERS: dict[str, Callable[..., Any]] = {
    "bytes": human_bytes, "count": human_count, "duration": human_seconds, "latency": human_latency, "utc": utc,
    "iso": iso, "short_id": short_id, "hash": human_hash, "evaluation": human_evaluation,
}  # fmt: skip
