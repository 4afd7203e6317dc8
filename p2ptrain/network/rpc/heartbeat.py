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
LATE_SHARE = 0.25
"""The same as a share of the silence that ends the channel, where that is less."""
LOOKS = 8
"""Bytes that arrived but were not read yet are looked for so many times in a silence."""


class Heartbeat:
    """Runs two callbacks off one timer, from its making until `stop`.

    Args:
        stream: Whose arriving bytes are a sign of life.
        ping_seconds: ``ping`` is called when nothing was written for this long.
        silence_seconds: ``silent`` is called, once, when nothing was heard for this long.
        ping: Has a PING written; must not block or raise.
        silent: Ends the channel.

    Attributes:
        silence_seconds: As it counts now.
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
        self.silence_seconds = silence_seconds
        self._ping = ping
        self._silent = silent
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self._last_heard = now
        self._last_write = now
        self._num_arrived = 0
        self._paused = False
        self._silent_at: Callable[[float], float] = lambda last_heard: last_heard + silence_seconds
        self._due = now + ping_seconds
        self._timer = self._loop.call_at(self._due, self._tick)

    def heard(self) -> None:
        """Note that something was read."""
        self._last_heard = self._loop.time()
        self._num_arrived = self._stream.num_arrived

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

    def set_ping(self, seconds: float) -> None:
        """Call ``ping`` after this time without writes from now on."""
        self._ping_seconds = seconds
        self._reschedule()

    def set_silence(self, seconds: float, silent_at: Callable[[float], float]) -> None:
        """Call ``silent`` sooner from now on.

        Args:
            seconds: The shortest silence that counts.
            silent_at: When the other side counts as silent, by when it was last heard on this stream; in loop time.
        """
        self.silence_seconds = seconds
        self._silent_at = silent_at
        self.heard()
        self._reschedule()

    def stop(self) -> None:
        """Call nothing any more; idempotent."""
        self._timer.cancel()

    def last_heard(self) -> float:
        """When the last sign of life came, in the loop's time: now if bytes arrived since this was last looked for."""
        if self._paused or self._stream.num_arrived > self._num_arrived:
            self.heard()
        return self._last_heard

    def _tick(self) -> None:
        now = self._loop.time()
        if now > self._due + min(LATE_SECONDS, LATE_SHARE * self.silence_seconds):
            self.heard()
        if now >= self._silent_at(self.last_heard()):
            self._silent()
            return
        if now >= self._last_write + self._ping_seconds:
            self._last_write = now  # A blocked writer is not asked again and again.
            self._ping()
        self._schedule(now)

    def _reschedule(self) -> None:
        if not self._timer.cancelled():  # Else this was stopped.
            self._timer.cancel()
            self._schedule(self._loop.time())

    def _schedule(self, now: float) -> None:
        """Set the timer for whatever is due first."""
        look_at = min(self._silent_at(self._last_heard), now + self.silence_seconds / LOOKS)
        self._due = max(now, min(self._last_write + self._ping_seconds, look_at))
        self._timer = self._loop.call_at(self._due, self._tick)
