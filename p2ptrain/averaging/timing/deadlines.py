"""How long to wait: for the rest once most are there, for an attempt, and for a sign of life. Pure decisions.

Absolute times cannot be right for both a laptop on a phone's hotspot and a rack: what is usual is learnt from the swarm
itself. The quorum of a round says how long its transfers take on these links today, and the rest may take the grace
period and a fifth of that longer; so a peer at a tenth of the others' speed costs them no more. An attempt as a whole
may take as long as the last ones did, with a margin that follows their scatter; the manifest only bounds it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from p2ptrain.manifest import AveragingSpec

SLACK = 0.2
"""Share of the time until the quorum that the rest may take longer."""
MIN_HISTORY = 3
SCATTERS = 6.0
"""Median absolute deviations beyond the median; 4 standard deviations where times are normally distributed."""

FORWARD_SECONDS = 0.5
"""How long signatures and certificates may take to spread before a member does without them."""
SILENCE_SHARE = 0.5
"""Of the grace period, that a member of an attempt may miss beats before the others go on without it."""
LEADER_SHARE, LEAST_LEADER_SECONDS = 0.75, 1.5
"""The same for a leader that collects tickets, and the least: slow peers lead, too. Less than a grace period, so that
another group can be formed within it, and more than `SILENCE_SHARE`, because nothing else is lost meanwhile."""

BEATS_PER_GRACE = 8
LEAST_BEAT_SECONDS, MOST_BEAT_SECONDS = 0.1, 0.5
LEAST_QUIET_SECONDS = 0.5
ROUND_TRIPS = 4.0
"""A beat may be late by so many round trips: lost pieces of data are sent again after a few."""
LATENESSES = 3.0
"""And by so many times what the latest one was late by, where the link or the machine is slow at all times."""


def quorum_of_others(others: int, quorum: float) -> int:
    """How many of the other members make a quorum.

    The member that waits does not count itself: its own part is there at once, and says nothing about the links.
    At least one, or whoever waits for a single other would give it nothing but the grace period.
    """
    return min(others, max(1, math.ceil(quorum * others)))


def least_mask(members: int, quorum: float) -> int:
    """How many contributions an honest owner of a share counts at least, in a roster of so many members.

    Its own and those of a quorum; of them it may have refused a minority. Who counts fewer would decide a round alone.
    """
    if members < 3:
        return 1
    return min(math.ceil(members / 2), 1 + quorum_of_others(members - 1, quorum))


def patience_seconds(seconds_until_quorum: float, grace_seconds: float) -> float:
    """How long the rest may take once a quorum was there after ``seconds_until_quorum``."""
    return grace_seconds + SLACK * seconds_until_quorum


def attempt_seconds(history: Sequence[float], spec: AveragingSpec) -> float:
    """How long one attempt may take: median + 6 · MAD of the last ones and at least twice the median, with grace.

    Args:
        history: Seconds that the last attempts took that came to their end; too few say nothing.
        spec: Its ``round_seconds`` is the upper bound, and its ``grace_seconds`` are added twice: the masks wait for
            one grace period, the means for another.
    """
    if len(history) < MIN_HISTORY:
        return spec.round_seconds
    median = statistics.median(history)
    scatter = statistics.median(abs(seconds - median) for seconds in history)
    usual = max(2.0 * median, median + SCATTERS * scatter)
    return min(spec.round_seconds, usual + 2.0 * spec.grace_seconds)


def beat_seconds(grace_seconds: float) -> float:
    """How often a peer that others wait for says that it is at it (`p2ptrain.averaging.timing.keepalive`)."""
    return min(MOST_BEAT_SECONDS, max(LEAST_BEAT_SECONDS, grace_seconds / BEATS_PER_GRACE))


def quiet_seconds(
    grace_seconds: float, allowance_seconds: float, round_trip_seconds: float, latest_seconds: float
) -> float:
    """How long after a beat the next one may come before the peer counts as quiet.

    Args:
        grace_seconds: The swarm's; says when the next one is due.
        allowance_seconds: How late it may be in any case: a part of the time that others wait.
        round_trip_seconds: To the peer, as it was measured.
        latest_seconds: What its latest beat so far was late by.
    """
    late = max(allowance_seconds, LEAST_QUIET_SECONDS, ROUND_TRIPS * round_trip_seconds, LATENESSES * latest_seconds)
    return beat_seconds(grace_seconds) + late


def silence_seconds(grace_seconds: float, round_trip_seconds: float = 0.0) -> float:
    """How long a member of an attempt may be silent before the others go on without it; less than a grace period.

    Args:
        grace_seconds: The swarm's.
        round_trip_seconds: To the member, as it was measured; 0 where it was not.
    """
    return quiet_seconds(grace_seconds, SILENCE_SHARE * grace_seconds, round_trip_seconds, 0.0)


def leader_allowance_seconds(grace_seconds: float) -> float:
    """How late a beat of a leader may be; see `quiet_seconds`."""
    return max(LEADER_SHARE * grace_seconds, LEAST_LEADER_SECONDS) - beat_seconds(grace_seconds)


def leader_dial_seconds(grace_seconds: float, usual_seconds: float | None, most_seconds: float) -> float:
    """How long a dial of a leader may take before the next one is asked.

    As long as the leader may be silent later. A dial of an unknown peer may take longer: its link may be slow.

    Args:
        grace_seconds: The swarm's.
        usual_seconds: What dials of this leader take; None where that is unknown.
        most_seconds: Upper bound.
    """
    if usual_seconds is None:
        return most_seconds
    return min(most_seconds, quiet_seconds(grace_seconds, leader_allowance_seconds(grace_seconds), usual_seconds, 0.0))
