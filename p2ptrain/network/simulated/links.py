"""How fast bytes travel in a simulated network: latency, loss, and links that streams share fairly."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass

QUANTUM_BYTES = 64 * 1024
"""Streams take turns on a link in units of this size at most."""
QUANTUM_SECONDS = 0.02
"""What a slow link carries in this time makes a smaller unit: real links take turns by packets."""
PACKET_BYTES = 1500

_SMALL_BYTES = 4096
_NEGLIGIBLE_SECONDS = 0.001
_MAX_RETRANSMISSIONS = 8


@dataclass(frozen=True)
class LinkModel:
    """What the network between peers is like.

    Latencies are one way. A pair's is drawn once, from its own seed, so that it does not depend on who talks when.
    """

    latency_seconds: tuple[float, float] = (0.005, 0.080)
    """Bounds of the uniform distribution from which each pair's latency is drawn."""
    latency: Callable[[random.Random], float] | None = None
    """Draws a pair's latency instead, where given."""
    jitter: float = 0.1
    """Each piece of data takes up to this share of the latency longer."""
    loss: float = 0.0
    """Probability that a piece of data (at most 64 KiB) is lost and sent again."""
    retransmit_seconds: float = 0.2
    """Delay of the first retransmission; each further one takes twice as long."""
    up_bytes_per_second: float | None = 12.5e6
    """Uplink of a peer that is given none; None: unlimited."""
    down_bytes_per_second: float | None = 12.5e6
    """Downlink of a peer that is given none; None: unlimited."""
    buffer_bytes: int = 1 << 20
    """What a stream holds in one direction that was written but not read, before its writer blocks."""
    dead_seconds: float = 40.0
    """After so long without a connection the streams across it end at both sides."""

    def draw_latency(self, generator: random.Random) -> float:
        """One pair's latency in seconds."""
        return self.latency(generator) if self.latency else generator.uniform(*self.latency_seconds)

    def draw_delay(self, latency_seconds: float, generator: random.Random) -> float:
        """How long one piece of data is on its way, in seconds."""
        delay = latency_seconds * (1.0 + self.jitter * generator.random())
        if self.loss:
            pause = self.retransmit_seconds
            for _ in range(_MAX_RETRANSMISSIONS):
                if generator.random() >= self.loss:
                    break
                delay += pause
                pause *= 2
        return delay


class Link:
    """One peer's uplink or downlink: streams take turns, one piece each.

    Pieces that are small and find the link idle pass at once; what they take is charged to those after them.

    Args:
        loop: The virtual-time loop.
        context: The network's own context, in which callbacks run.
        bytes_per_second: The rate; None: unlimited.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, context: Context, bytes_per_second: float | None) -> None:
        self.bytes_per_second = bytes_per_second
        self._loop = loop
        self._context = context
        self._flows: dict[int, deque[tuple[int, Callable[[], None]]]] = {}
        self._free_at = 0.0
        self._busy = False

    def send(self, flow: int, num_bytes: int, then: Callable[[], None]) -> None:
        """Call ``then`` when ``num_bytes`` of stream ``flow`` have passed, in order within the stream."""
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
        """In units of this size streams take turns here."""
        if self.bytes_per_second is None:
            return QUANTUM_BYTES
        return min(QUANTUM_BYTES, max(PACKET_BYTES, int(QUANTUM_SECONDS * self.bytes_per_second)))

    def drop(self, flow: int) -> None:
        """Forget what stream ``flow`` has queued here and is not on its way."""
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
            self._flows[flow] = queue  # at the end: the others take their turns first
        self._free_at = max(self._free_at, self._loop.time()) + num_bytes / self.bytes_per_second
        self._loop.call_at(self._free_at, self._finish, then, context=self._context)

    def _finish(self, then: Callable[[], None]) -> None:
        then()
        self._start_next()
