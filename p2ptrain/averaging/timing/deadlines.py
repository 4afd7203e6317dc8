"""Timeouts: for the rest after a quorum, for an attempt, and for keepalives. Pure functions.

No fixed timeout fits both a phone's hotspot and a rack. The time until a quorum shows how long transfers take today:
the rest may take a fifth longer, and the grace period. An attempt's deadline follows the durations of the last ones and
their scatter; the manifest bounds it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from p2ptrain.manifest import AveragingSpec

SLACK = 0.2  # extra time for the rest, as a fraction of the time until the quorum
MIN_HISTORY = 3
SCATTERS = 6.0  # median absolute deviations above the median; 4 standard deviations of a normal distribution

FORWARD_SECONDS = 0.5  # timeout for signatures and certificates to spread
SILENCE_SHARE = 0.5  # silence timeout of a member in an attempt, as a fraction of the grace period
LEADER_SHARE, LEAST_LEADER_SECONDS = 0.75, 1.5
"""The same for a leader that collects tickets, and the minimum, because slow peers lead, too. < 1, so that another
group can form within the grace period; > `SILENCE_SHARE`, because this wait delays nothing else."""

BEATS_PER_GRACE = 8
LEAST_BEAT_SECONDS, MOST_BEAT_SECONDS = 0.1, 0.5
LEAST_QUIET_SECONDS = 0.5
ROUND_TRIPS = 4.0  # round trips by which a keepalive may be late: a few retransmissions
LATENESSES = 3.0  # the same in multiples of the peer's largest lateness, for slow links and machines


def quorum_of_others(others: int, quorum: float) -> int:
    """Return how many of the other members make a quorum; at least 1 if there are others.

    The waiting member does not count itself: its own part is there at once, and does not measure a link.
    """
    return min(others, max(1, math.ceil(quorum * others)))


def least_mask(members: int, quorum: float) -> int:
    """Return the minimum number of contributions in an honest owner's mask, in a roster of ``members``.

    It has the own part and those of a quorum, less a refused minority. An owner with fewer would decide the round
    alone.
    """
    if members < 3:
        return 1
    return min(math.ceil(members / 2), 1 + quorum_of_others(members - 1, quorum))


def patience_seconds(seconds_until_quorum: float, grace_seconds: float) -> float:
    """Return the timeout for the rest after a quorum took ``seconds_until_quorum``."""
    return grace_seconds + SLACK * seconds_until_quorum


def attempt_seconds(history: Sequence[float], spec: AveragingSpec) -> float:
    """Return the deadline of an attempt: max(2 · median, median + 6 · MAD) of the last ones, plus two grace periods.

    Masks wait for one grace period, and means for another. ``spec.round_seconds`` is the upper bound, and the result if
    ``history``, the seconds of the last successful attempts, has fewer than `MIN_HISTORY`.
    """
    if len(history) < MIN_HISTORY:
        return spec.round_seconds
    median = statistics.median(history)
    scatter = statistics.median(abs(seconds - median) for seconds in history)
    usual = max(2.0 * median, median + SCATTERS * scatter)
    return min(spec.round_seconds, usual + 2.0 * spec.grace_seconds)


def beat_seconds(grace_seconds: float) -> float:
    """Return the keepalive interval of a peer that others wait for (`p2ptrain.averaging.timing.keepalive`)."""
    return min(MOST_BEAT_SECONDS, max(LEAST_BEAT_SECONDS, grace_seconds / BEATS_PER_GRACE))


def quiet_seconds(
    grace_seconds: float, allowance_seconds: float, round_trip_seconds: float, latest_seconds: float
) -> float:
    """Return the keepalive timeout, from one keepalive to the next.

    Args:
        allowance_seconds: Minimum tolerated lateness: a fraction of the time that others wait.
        round_trip_seconds: To the peer, as measured.
        latest_seconds: The peer's largest lateness so far.
    """
    late = max(allowance_seconds, LEAST_QUIET_SECONDS, ROUND_TRIPS * round_trip_seconds, LATENESSES * latest_seconds)
    return beat_seconds(grace_seconds) + late


def silence_seconds(grace_seconds: float, round_trip_seconds: float = 0.0) -> float:
    """Return the silence timeout of a member in an attempt; ``round_trip_seconds`` is 0 if it was not measured."""
    return quiet_seconds(grace_seconds, SILENCE_SHARE * grace_seconds, round_trip_seconds, 0.0)


def leader_allowance_seconds(grace_seconds: float) -> float:
    """Return how late a leader's keepalive may be; see `quiet_seconds`."""
    return max(LEADER_SHARE * grace_seconds, LEAST_LEADER_SECONDS) - beat_seconds(grace_seconds)


def leader_dial_seconds(grace_seconds: float, usual_seconds: float | None, most_seconds: float) -> float:
    """Return the timeout of a dial of a leader: its keepalive timeout, at most ``most_seconds``.

    ``usual_seconds`` is the usual duration of its dials. An unknown leader has None, and gets ``most_seconds``.
    """
    if usual_seconds is None:
        return most_seconds
    return min(most_seconds, quiet_seconds(grace_seconds, leader_allowance_seconds(grace_seconds), usual_seconds, 0.0))
