"""The speed of a simulated network: latency, loss, and links that streams share fairly."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass

QUANTUM_BYTES = 64 * 1024
"""Upper bound of a stream's turn on a link."""
QUANTUM_SECONDS = 0.02
"""Bound of a turn on a slow link; real links take turns by packets."""
PACKET_BYTES = 1500
RETRANSMIT_SECONDS = 0.2
"""Delay of the first retransmission; it doubles with each further one."""
DEAD_SECONDS = 40.0
"""Time without a connection before the streams across it end at both sides."""

_SMALL_BYTES = 4096
_NEGLIGIBLE_SECONDS = 0.001
_MAX_RETRANSMISSIONS = 8


@dataclass(frozen=True)
class LinkModel:
    """The network between peers: latencies, loss, rates and buffers.

    Latencies are one way. Each pair draws its latency once from its own seed, independent of the order of dials.
    """

    latency_seconds: tuple[float, float] = (0.005, 0.080)
    """Bounds of the uniform distribution of the pairs' latencies."""
    jitter: float = 0.1
    """Largest random delay of a piece of data, as a share of the latency."""
    loss: float = 0.0
    """Probability that a piece of data (at most 64 KiB) is lost and retransmitted."""
    up_bytes_per_second: float | None = 12.5e6
    """Default uplink of a peer; None sets no limit."""
    down_bytes_per_second: float | None = 12.5e6
    """Default downlink of a peer; None sets no limit."""
    are_dials_free: bool = False
    """True if a dial of a reachable peer takes no round trip, as on a connection that a daemon holds already."""
    buffer_bytes: int = 1 << 20
    """Unread data of a stream in one direction before its writer blocks."""

    def draw_delay(self, latency_seconds: float, generator: random.Random) -> float:
        """Return the travel time of one piece of data in seconds."""
        delay = latency_seconds * (1.0 + self.jitter * generator.random())
        if self.loss:
            pause = RETRANSMIT_SECONDS
            for _ in range(_MAX_RETRANSMISSIONS):
                if generator.random() >= self.loss:
                    break
                delay += pause
                pause *= 2
        return delay


class Link:
    """One peer's uplink or downlink; streams take turns, one piece each. Without a rate it is unlimited.

    Small pieces pass an idle link at once; later pieces pay for their time. Callbacks run in ``context``.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, context: Context, bytes_per_second: float | None) -> None:
        self.bytes_per_second = bytes_per_second
        self._loop = loop
        self._context = context
        self._flows: dict[int, deque[tuple[int, Callable[[], None]]]] = {}
        self._free_at = 0.0
        self._busy = False

    def send(self, flow: int, num_bytes: int, then: Callable[[], None]) -> None:
        """Call ``then`` once ``num_bytes`` of stream ``flow`` have passed, in order within the stream."""
        if self.bytes_per_second is None:
            then()
            return
        now = self._loop.time()
        if not self._busy and num_bytes <= _SMALL_BYTES and self._free_at - now < _NEGLIGIBLE_SECONDS:
            self._free_at = max(self._free_at, now) + num_bytes / self.bytes_per_second
            then()
            return
        self._flows.setdefault(flow, deque()).append((num_bytes, then))
        if not self._busy:
            self._start_next()

    @property
    def quantum_bytes(self) -> int:
        """Bytes per turn of a stream."""
        if self.bytes_per_second is None:
            return QUANTUM_BYTES
        return min(QUANTUM_BYTES, max(PACKET_BYTES, int(QUANTUM_SECONDS * self.bytes_per_second)))

    def drop(self, flow: int) -> None:
        """Drop the queued pieces of stream ``flow``, except the one in transit."""
        self._flows.pop(flow, None)

    def _start_next(self) -> None:
        if not self._flows or self.bytes_per_second is None:
            self._busy = False
            return
        self._busy = True
        flow = next(iter(self._flows))
        queue = self._flows.pop(flow)
        num_bytes, then = queue.popleft()
        if queue:
            self._flows[flow] = queue  # at the end, behind the other streams
        self._free_at = max(self._free_at, self._loop.time()) + num_bytes / self.bytes_per_second
        self._loop.call_at(self._free_at, self._finish, then, context=self._context)

    def _finish(self, then: Callable[[], None]) -> None:
        then()
        self._start_next()
