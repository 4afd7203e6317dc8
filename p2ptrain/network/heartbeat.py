"""A channel's heartbeat: when to say something, and when the other side has been silent for too long.

What counts as silence is decided here alone. It is none when this process was stopped itself, when this side chose not
to read (`Heartbeat.pause`), or when bytes arrived that nobody has read yet, as with a frame that takes long to arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2ptrain.network.transport import Stream

LATE_SECONDS = 1.0
"""A timer that runs this late says that this process was stopped meanwhile."""


class Heartbeat:
    """Runs two callbacks off one timer, from its making until `stop`.

    Args:
        stream: Whose arriving bytes are a sign of life.
        ping_seconds: ``ping`` is called when nothing was written for this long.
        silence_seconds: ``silent`` is called, once, when nothing was heard for this long.
        ping: Has a PING written; must not block or raise.
        silent: Ends the channel.
    """

    def __init__(
        self,
        stream: Stream,
        ping_seconds: float,
        silence_seconds: float,
        ping: Callable[[], None],
        silent: Callable[[], None],
    ) -> None:
        self._stream = stream
        self._ping_seconds = ping_seconds
        self._silence_seconds = silence_seconds
        self._ping = ping
        self._silent = silent
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self._last_heard = now
        self._last_write = now
        self._num_arrived = 0
        self._paused = False
        self._due = now + ping_seconds
        self._timer = self._loop.call_at(self._due, self._tick)

    def heard(self) -> None:
        """Note that something was read."""
        self._last_heard = self._loop.time()

    def wrote(self) -> None:
        """Note that something is written."""
        self._last_write = self._loop.time()

    def pause(self) -> None:
        """This side does not read for now: what it does not hear is its own doing."""
        self._paused = True

    def resume(self) -> None:
        """This side reads again; silence counts from now."""
        self._paused = False
        self.heard()

    def stop(self) -> None:
        """Call nothing any more; idempotent."""
        self._timer.cancel()

    def _tick(self) -> None:
        now = self._loop.time()
        arrived = self._stream.num_arrived
        if now > self._due + LATE_SECONDS or self._paused or arrived > self._num_arrived:
            self._last_heard = now
        self._num_arrived = arrived
        if now >= self._last_heard + self._silence_seconds:
            self._silent()
            return
        next_ping = self._last_write + self._ping_seconds
        if now >= next_ping:
            next_ping = now + self._ping_seconds
            self._ping()
        self._due = min(next_ping, self._last_heard + self._silence_seconds)
        self._timer = self._loop.call_at(self._due, self._tick)
