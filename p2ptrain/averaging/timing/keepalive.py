"""Keepalives from a peer that others wait for: a leader that collects tickets, a delegate that stands for its cell.

A channel's own heartbeats detect a lost peer after 10 seconds. That is right for a transfer, and too late where the
groups of the level above go on after a grace period. So the peer that is waited for sends several keepalives in a grace
period. It counts as quiet once they fail to come for longer than its link and the grace period explain. Being quiet
proves nothing: a member goes on listening to a quiet delegate while it turns to the next one (`first_result`). A false
alarm costs a message or two.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from p2ptrain.averaging.timing.deadlines import beat_seconds, quiet_seconds
from p2ptrain.errors import DeadlineError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.heartbeat import LATE_SECONDS
from p2ptrain.network.schema import Message
from p2ptrain.tasks import Tasks

T = TypeVar("T")


class Keepalive(Message, frozen=True):
    """Wait for my answer. Each protocol with such answers derives its own from this and from its tagged base.

    Attributes:
        joined: Whether the sender is in a group, so that no other peer could take its place.
    """

    joined: bool = False


class KeepaliveStatus:
    """Whether this peer has joined a group, as its keepalives say.

    Attributes:
        joined: See `Keepalive`.
    """

    def __init__(self) -> None:
        self.joined = False
        self._changed: asyncio.Future[None] | None = None

    def set(self, joined: bool) -> None:
        """Have a keepalive sent to all that wait, at once."""
        self.joined = joined
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def changed(self) -> asyncio.Future[None]:
        """Return a future that is done when this is set the next time."""
        if self._changed is None or self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed


async def beat_until(
    channel: Channel,
    end: asyncio.Future[Any],
    grace_seconds: float,
    keepalive: type[Keepalive],
    status: KeepaliveStatus,
) -> None:
    """Send keepalives, the first at once, until ``end`` is done, or the other side is gone.

    Raises:
        PeerLostError, PeerRefusedError, DeadlineError: See `Channel.send`.
    """
    while not (end.done() or channel.lost.done()):
        await channel.send(keepalive(status.joined))
        waiting: set[asyncio.Future[Any]] = {end, channel.lost, status.changed()}
        await asyncio.wait(waiting, timeout=beat_seconds(grace_seconds), return_when=asyncio.FIRST_COMPLETED)


@dataclass(frozen=True)
class Patience:
    """How long to wait for an answer.

    Attributes:
        seconds: Deadline for the answer.
        grace_seconds: The swarm's; says how often keepalives come.
        allowance_seconds: How late a keepalive may be however fast the link is.
        round_trip_seconds: Measured when the channel was opened.
    """

    seconds: float
    grace_seconds: float
    allowance_seconds: float
    round_trip_seconds: float


async def answer_after_beats(
    channel: Channel,
    schema: type[T],
    patience: Patience,
    max_bytes: int,
    on_quiet: Callable[[], None] | None = None,
) -> T:
    """Return the first message that is no keepalive.

    A peer that joined a group does not count as quiet before its channel does: its keepalives compete with the data
    that it sends, and no other peer could take its place.

    Args:
        channel: To the peer that is waited for.
        schema: The tagged base of its answers and of its keepalive.
        patience: How long to wait.
        max_bytes: A longer answer is a `ProtocolError`.
        on_quiet: Called each time keepalives fail to come; None to give up then.

    Raises:
        DeadlineError: No answer in time, or the peer fell quiet and ``on_quiet`` is None.
        PeerLostError, PeerRefusedError, ProtocolError: See `Channel.receive`.
    """
    loop, grace = asyncio.get_running_loop(), patience.grace_seconds
    heard = loop.time()
    deadline, latest, num_beats, is_patient = heard + patience.seconds, 0.0, 0, False
    while True:
        now = loop.time()
        quiet = quiet_seconds(grace, patience.allowance_seconds, patience.round_trip_seconds, latest)
        until = deadline if is_patient else min(deadline, heard + quiet)
        try:
            message = await channel.receive(schema, max(0.0, until - now), max_bytes)
        except DeadlineError:
            if loop.time() >= deadline:
                raise
            if loop.time() > until + LATE_SECONDS:  # This process was stopped itself: the messages are still unread.
                heard = loop.time()
                continue
            if on_quiet is None:
                raise DeadlineError(f"peer {channel.remote[-8:]} fell silent: nothing for {quiet:.1f} s") from None
            is_patient = True
            on_quiet()
            continue
        if not isinstance(message, Keepalive):
            return message
        if num_beats:
            latest = max(latest, loop.time() - heard - beat_seconds(grace))
        num_beats += 1
        heard, is_patient = loop.time(), message.joined


async def first_result(
    tries: Iterable[Callable[[Callable[[], None]], Coroutine[Any, Any, T]]], on_failure: Callable[[Exception], bool]
) -> T | None:
    """Return the first result of several tries; the next one starts when all before it have failed or fallen quiet.

    Args:
        tries: By order of preference; each takes a function to call when it is quiet.
        on_failure: Called with the error of a failed try; returns False to give all of them up.

    Returns:
        None when all failed.

    Raises:
        Exception: The error for which ``on_failure`` returned False.
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
