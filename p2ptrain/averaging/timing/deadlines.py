"""Timeouts for stragglers, attempts and keepalives, and keepalives from a leader or delegate that others wait for.

No fixed timeout fits both a phone's hotspot and a rack. The time until a quorum shows how long transfers take today:
stragglers may take a fifth longer, and the grace period.

A channel's own heartbeat is too slow: the groups of the level above proceed after a grace period. The awaited peer
therefore sends several keepalives in a grace period, and counts as quiet when they are later than its link explains. A
quiet peer may be alive: a member still listens to it while it tries the next one (`first_result`).
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from p2ptrain.errors import DeadlineError
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.receive import LATE_SECONDS
from p2ptrain.network.schema import Message
from p2ptrain.tasks import Tasks

SLACK = 0.2  # extra time for stragglers, as a fraction of the time until the quorum
MIN_HISTORY = 3
SCATTERS = 6.0  # median absolute deviations above the median; 4 standard deviations of a normal distribution
FORWARD_SECONDS = 0.5  # timeout for signatures and certificates to spread
SILENCE_SHARE = 0.5  # silence timeout of a member in an attempt, as a fraction of the grace period
LEADER_SHARE, LEAST_LEADER_SECONDS = 0.75, 1.5
"""The same for a leader that collects tickets, and the minimum, because slow peers lead, too. < 1, so that another
group can form within the grace period; > `SILENCE_SHARE`, because this wait delays nothing else."""
QUIET_GRACES = 0.5
"""Allowed delay of a delegate's keepalive, in grace periods; two such delays fit the level above's grace period."""
KEEPALIVES_PER_GRACE = 8
LEAST_KEEPALIVE_SECONDS, MOST_KEEPALIVE_SECONDS = 0.1, 0.5
LEAST_QUIET_SECONDS = 0.5
PART_ROUND_TRIPS = 3.0  # the roster, a stream's opening and the part take two; a third for a retransmission
ROUND_TRIPS = 4.0  # round trips by which a keepalive may be late: a few retransmissions
MOST_LATE_SECONDS = 10.0
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


def straggler_seconds(seconds_until_quorum: float, grace_seconds: float, round_trip_seconds: float = 0.0) -> float:
    """Return the timeout for stragglers after a quorum took ``seconds_until_quorum``.

    ``round_trip_seconds`` is the longest to a member; a far one may take two grace periods.
    """
    allowed = min(max(grace_seconds, PART_ROUND_TRIPS * round_trip_seconds), 2.0 * grace_seconds)
    return allowed + SLACK * seconds_until_quorum


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


def keepalive_seconds(grace_seconds: float) -> float:
    return min(MOST_KEEPALIVE_SECONDS, max(LEAST_KEEPALIVE_SECONDS, grace_seconds / KEEPALIVES_PER_GRACE))


def quiet_seconds(
    grace_seconds: float, allowance_seconds: float, round_trip_seconds: float, latest_seconds: float
) -> float:
    """Return the keepalive timeout, from one keepalive to the next.

    ``allowance_seconds`` is the minimum tolerated lateness, ``latest_seconds`` the peer's largest lateness so far. What
    the peer showed counts up to `MOST_LATE_SECONDS`: it could answer late on purpose.
    """
    shown = min(max(ROUND_TRIPS * round_trip_seconds, LATENESSES * latest_seconds), MOST_LATE_SECONDS)
    return keepalive_seconds(grace_seconds) + max(allowance_seconds, LEAST_QUIET_SECONDS, shown)


def silence_seconds(grace_seconds: float, round_trip_seconds: float = 0.0) -> float:
    """Return the silence timeout of a member in an attempt; ``round_trip_seconds`` is 0 if it was not measured."""
    return quiet_seconds(grace_seconds, SILENCE_SHARE * grace_seconds, round_trip_seconds, 0.0)


def leader_allowance_seconds(grace_seconds: float) -> float:
    """Return how late a leader's keepalive may be; see `quiet_seconds`."""
    return max(LEADER_SHARE * grace_seconds, LEAST_LEADER_SECONDS) - keepalive_seconds(grace_seconds)


def leader_dial_seconds(grace_seconds: float, usual_seconds: float | None, most_seconds: float) -> float:
    """Return the timeout of a dial of a leader: its keepalive timeout, at most ``most_seconds``.

    ``usual_seconds`` is the usual duration of its dials; None for an unknown leader.
    """
    if usual_seconds is None:
        return most_seconds
    return min(most_seconds, quiet_seconds(grace_seconds, leader_allowance_seconds(grace_seconds), usual_seconds, 0.0))


T = TypeVar("T")


class Keepalive(Message, frozen=True):
    """Extends the wait for an answer; each protocol derives its own from this and from its tagged base.

    ``joined`` means that the sender is in a group, so that no other peer could replace it.
    """

    joined: bool = False


class KeepaliveStatus:
    """The content of this peer's keepalives; see `Keepalive`."""

    def __init__(self) -> None:
        self.joined = False
        self._changed: asyncio.Future[None] | None = None

    def set(self, joined: bool) -> None:
        """Update the status, and send a keepalive to all waiting peers at once."""
        self.joined = joined
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def changed(self) -> asyncio.Future[None]:
        """Return a future that is done at the next `set`."""
        if self._changed is None or self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed


async def send_keepalives(
    channel: Channel,
    end: asyncio.Future[Any],
    grace_seconds: float,
    keepalive: type[Keepalive],
    status: KeepaliveStatus,
) -> None:
    """Send keepalives, the first at once, until ``end`` is done or the channel is lost; raises like `Channel.send`."""
    while not (end.done() or channel.lost.done()):
        await channel.send(keepalive(status.joined))
        waiting: set[asyncio.Future[Any]] = {end, channel.lost, status.changed()}
        await asyncio.wait(waiting, timeout=keepalive_seconds(grace_seconds), return_when=asyncio.FIRST_COMPLETED)


@dataclass(frozen=True)
class AnswerTimeouts:
    """Timeouts of the wait for an answer that keepalives extend.

    Attributes:
        seconds: Deadline of the answer.
        allowance_seconds: Minimum tolerated lateness of a keepalive.
        round_trip_seconds: Measured when the channel was opened.
    """

    seconds: float
    grace_seconds: float
    allowance_seconds: float
    round_trip_seconds: float


async def receive_answer(
    channel: Channel,
    schema: type[T],
    timeouts: AnswerTimeouts,
    max_bytes: int,
    on_quiet: Callable[[], None] | None = None,
) -> T:
    """Return the first message that is no keepalive; keepalives extend the wait up to the deadline.

    A peer that joined a group is not quiet before its channel is lost: its keepalives compete with its data, and no
    other peer could replace it.

    Args:
        schema: The tagged base of the answers and of their keepalive.
        on_quiet: Called whenever keepalives time out; None to fail then.

    Raises:
        DeadlineError: No answer by the deadline, or the peer fell quiet and ``on_quiet`` is None.
        PeerLostError, PeerRefusedError, ProtocolError: See `Channel.receive`.
    """
    loop, grace = asyncio.get_running_loop(), timeouts.grace_seconds
    heard = loop.time()
    deadline, latest, num_keepalives, only_deadline = heard + timeouts.seconds, 0.0, 0, False
    while True:
        now = loop.time()
        quiet = quiet_seconds(grace, timeouts.allowance_seconds, timeouts.round_trip_seconds, latest)
        until = deadline if only_deadline else min(deadline, heard + quiet)
        try:
            message = await channel.receive(schema, max(0.0, until - now), max_bytes)
        except DeadlineError:
            if loop.time() >= deadline:
                raise
            if loop.time() > until + LATE_SECONDS:  # This process was suspended: messages are still unread.
                heard = loop.time()
                continue
            if on_quiet is None:
                raise DeadlineError(f"peer {channel.remote[-8:]} fell silent: nothing for {quiet:.1f} s") from None
            only_deadline = True
            on_quiet()
            continue
        if not isinstance(message, Keepalive):
            return message
        if num_keepalives:
            latest = max(latest, loop.time() - heard - keepalive_seconds(grace))
        num_keepalives += 1
        heard, only_deadline = loop.time(), message.joined


async def first_result(
    tries: Iterable[Callable[[Callable[[], None]], Coroutine[Any, Any, T]]], on_failure: Callable[[Exception], bool]
) -> T | None:
    """Return the first result of several tries, or None; the next starts once all before it have failed or fallen
    quiet.

    Args:
        tries: In order of preference; each takes a callback that reports it as quiet.
        on_failure: Called with the error of a failed try; returns False to raise it and give up all tries.
    """
    left, quiet, stirred = deque(tries), dict[int, None](), asyncio.Event()
    running: dict[asyncio.Task[T], int] = {}
    async with Tasks() as tasks:
        while True:
            for task in [task for task in running if task.done()]:
                del running[task]
                error = task.exception()
                if error is None:
                    return task.result()
                if not (isinstance(error, Exception) and on_failure(error)):
                    raise error
            if left and all(number in quiet for number in running.values()):
                number = len(left)

                def fall_quiet(number: int = number) -> None:
                    quiet[number] = None
                    stirred.set()

                task = tasks.call(left.popleft()(fall_quiet), "bring a result")
                task.add_done_callback(lambda _: stirred.set())
                running[task] = number
            if not running:
                return None
            await stirred.wait()
            stirred.clear()
