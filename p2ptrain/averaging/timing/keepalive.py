"""Keepalives from a peer that others wait for: a leader that collects tickets, or the delegate of a cell.

A channel's own heartbeat is too slow here: the groups of the level above go on after a grace period. The awaited peer
therefore sends several keepalives in a grace period, and counts as quiet when they are later than its link explains. A
quiet peer may be alive: a member still listens to it while it tries the next one (`first_result`).
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
from p2ptrain.network.rpc.receive import LATE_SECONDS
from p2ptrain.network.schema import Message
from p2ptrain.tasks import Tasks

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


async def beat_until(
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
        await asyncio.wait(waiting, timeout=beat_seconds(grace_seconds), return_when=asyncio.FIRST_COMPLETED)


@dataclass(frozen=True)
class Patience:
    """Timeouts of the wait for an answer.

    Attributes:
        seconds: Deadline of the answer.
        allowance_seconds: Minimum tolerated lateness of a keepalive.
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
    """Return the first message that is no keepalive; keepalives extend the wait up to the deadline.

    A peer that joined a group is not quiet before its channel is lost: its keepalives compete with its data, and no
    other peer could replace it.

    Args:
        schema: The tagged base of the answers and of their keepalive.
        max_bytes: A longer answer is a `ProtocolError`.
        on_quiet: Called whenever keepalives time out; None to fail then.

    Raises:
        DeadlineError: No answer by the deadline, or the peer fell quiet and ``on_quiet`` is None.
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
            if loop.time() > until + LATE_SECONDS:  # This process was suspended: messages are still unread.
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
