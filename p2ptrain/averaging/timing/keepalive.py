"""Signs of life from a peer that others wait for: a leader that collects tickets, a delegate that stands for its cell.

A channel's own heartbeats say after 10 seconds that the other side is gone, which is right for a transfer, and too late
where the groups of the level above go on after a grace period. So whoever is waited for says that it is at it several
times in a grace period, and whoever waits takes it for quiet once that fails to come for longer than its link and the
grace period explain. Being quiet proves nothing. So a member that waits for a quiet delegate goes on listening to it
while it turns to the next (`first_result`), and what a false alarm costs is a message or two.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from p2ptrain.averaging.timing.deadlines import beat_seconds, quiet_seconds
from p2ptrain.errors import DeadlineError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.heartbeat import LATE_SECONDS
from p2ptrain.tasks import Tasks

T = TypeVar("T")


class Stage:
    """What a peer says of itself while others wait for it.

    Attributes:
        joined: Whether it is in a group, so that nobody could take its place.
    """

    def __init__(self) -> None:
        self.joined = False
        self._changed: asyncio.Future[None] | None = None

    def set(self, joined: bool) -> None:
        """Tell all that wait, at once."""
        self.joined = joined
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def changed(self) -> asyncio.Future[None]:
        """Done when this is set the next time."""
        if self._changed is None or self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
        return self._changed


async def beat_until(channel: Channel, end: asyncio.Future[Any], grace_seconds: float, stage: Stage) -> None:
    """Say at once, and then again and again, that the other side should wait; returns when ``end`` is done.

    Also when the other side is gone: then ``end`` may not be done.

    Raises:
        PeerLostError, PeerRefusedError, DeadlineError: See `Channel.send`.
    """
    while not (end.done() or channel.lost.done()):
        await channel.send({"kind": "waiting", "joined": stage.joined})
        waiting: set[asyncio.Future[Any]] = {end, channel.lost, stage.changed()}
        await asyncio.wait(waiting, timeout=beat_seconds(grace_seconds), return_when=asyncio.FIRST_COMPLETED)


async def answer_after_beats(
    channel: Channel,
    seconds: float,
    grace_seconds: float,
    allowance_seconds: float,
    round_trip_seconds: float,
    max_bytes: int,
    on_quiet: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """The first message that is no beat.

    A peer that joined a group is not taken for quiet before its channel is: its beats compete with what it sends, and
    another that came in its place would not be let in.

    Args:
        channel: To the peer that is waited for.
        seconds: Deadline for the answer.
        grace_seconds: The swarm's; says how often beats come.
        allowance_seconds: How late a beat may be however fast the link is.
        round_trip_seconds: Measured when the channel was opened.
        max_bytes: A longer answer is a `ProtocolError`.
        on_quiet: Called when beats fail to come, once for each time; None to give up then.

    Raises:
        DeadlineError: No answer in time, or the peer fell quiet and ``on_quiet`` is None.
        PeerLostError, PeerRefusedError, ProtocolError: See `Channel.receive`.
    """
    loop = asyncio.get_running_loop()
    heard = loop.time()
    deadline, latest, num_beats, patient = heard + seconds, 0.0, 0, False
    while True:
        now, patience = loop.time(), quiet_seconds(grace_seconds, allowance_seconds, round_trip_seconds, latest)
        until = deadline if patient else min(deadline, heard + patience)
        try:
            message = await channel.receive(dict, max(0.0, until - now), max_bytes)
        except DeadlineError:
            if loop.time() >= deadline:
                raise
            if loop.time() > until + LATE_SECONDS:  # This process was stopped itself: what came is still unread.
                heard = loop.time()
                continue
            if on_quiet is None:
                raise DeadlineError(f"peer {channel.remote[-8:]} fell silent: nothing for {patience:.1f} s") from None
            patient = True
            on_quiet()
            continue
        if message.get("kind") != "waiting":
            return message
        if num_beats:
            latest = max(latest, loop.time() - heard - beat_seconds(grace_seconds))
        num_beats += 1
        heard, patient = loop.time(), message.get("joined") is True


async def first_result(
    tries: Iterable[Callable[[Callable[[], None]], Coroutine[Any, Any, T]]], on_failure: Callable[[Exception], bool]
) -> T | None:
    """The first result of several ways to it: the next is tried when those before it have failed, or fallen quiet.

    Args:
        tries: By order of preference; each is called with what it should call when it is quiet.
        on_failure: Told how one failed; False to give all of them up.

    Returns:
        None when all failed.

    Raises:
        Whatever ``on_failure`` does not take.
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
