"""A channel's heartbeat: sends keepalives, and detects a silent remote.

Silence does not count while this process was suspended, while this side does not read (`Heartbeat.pause`), or while
unread bytes arrive, as in a long frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2ptrain.network.transport import Stream

LATE_SECONDS = 1.0
"""A timer this late means that the process was suspended; silence then starts anew."""
LATE_SHARE = 0.25
"""The same bound as a share of the silence timeout; the smaller one applies."""
LOOKS = 8
"""Number of checks for unread bytes within one silence timeout."""


class Heartbeat:
    """Keepalive timer of one stream: runs two callbacks from its creation until `stop`.

    Args:
        ping_seconds: Time without writes before ``ping``.
        silence_seconds: Silence timeout before ``silent``; a lower bound after `set_silence`.
        ping: Starts to write a PING; must not block or raise.
        silent: Ends the channel; called once.
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
        self._last_heard = self._loop.time()
        self._num_arrived = self._stream.num_arrived

    def wrote(self) -> None:
        self._last_write = self._loop.time()

    def pause(self) -> None:
        """Suspend the silence timeout while this side does not read."""
        self._paused = True

    def resume(self) -> None:
        """Restart the silence timeout from now."""
        self._paused = False
        self.heard()

    def set_ping(self, seconds: float) -> None:
        """Set the time without writes before ``ping``."""
        self._ping_seconds = seconds
        self._reschedule()

    def set_silence(self, seconds: float, silent_at: Callable[[float], float]) -> None:
        """Set a shorter silence timeout, with ``seconds`` as its lower bound.

        ``silent_at`` maps the time of the last sign of life to the timeout; both in loop time.
        """
        self.silence_seconds = seconds
        self._silent_at = silent_at
        self.heard()
        self._reschedule()

    def stop(self) -> None:
        """Stop all callbacks; idempotent."""
        self._timer.cancel()

    def last_heard(self) -> float:
        """Return the loop time of the last sign of life; newly arrived bytes and a pause count as now."""
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
            self._last_write = now  # A blocked writer gets one request per ping interval.
            self._ping()
        self._schedule(now)

    def _reschedule(self) -> None:
        if not self._timer.cancelled():  # Not after `stop`.
            self._timer.cancel()
            self._schedule(self._loop.time())

    def _schedule(self, now: float) -> None:
        look_at = min(self._silent_at(self._last_heard), now + self.silence_seconds / LOOKS)
        self._due = max(now, min(self._last_write + self._ping_seconds, look_at))
        self._timer = self._loop.call_at(self._due, self._tick)
