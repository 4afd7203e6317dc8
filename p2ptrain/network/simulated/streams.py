"""Streams between simulated peers: ordered bytes with latency, back-pressure, and every way to end.

Data of a stream waits its turn on the sender's uplink, is on its way for the latency, waits its turn on the receiver's
downlink, and lies in a buffer until it is read. What was written and not read is bounded; a writer beyond that blocks.
While the peers are not connected, data that is on its way is held, and goes on when they are again.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Protocol

from p2ptrain.errors import PeerLostError
from p2ptrain.network.simulated.links import Link, LinkModel
from p2ptrain.network.transport import PeerId, Stream


class Endpoint(Protocol):
    """What a stream knows of the peer at one of its ends."""

    name: str
    peer_id: PeerId
    uplink: Link
    downlink: Link


class Medium(Protocol):
    """What a stream knows of the network."""

    context: Context
    model: LinkModel
    random: random.Random

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The virtual-time loop."""

    def connected(self, first: Endpoint, second: Endpoint) -> bool:
        """Whether bytes get from one to the other now."""

    def latency(self, first: Endpoint, second: Endpoint) -> float:
        """One way, in seconds."""

    def record(self, event: str, *details: object) -> None:
        """Add to the trace."""

    def forget(self, stream: int, end: Endpoint) -> None:
        """One end of the stream is over."""


class Pipe:
    """One direction of a stream."""

    def __init__(self, medium: Medium, flow: int, source: Endpoint, target: Endpoint) -> None:
        self.medium = medium
        self.flow = flow
        self.source = source
        self.target = target
        self.buffer = bytearray()
        self.ended = False
        self.undelivered_bytes = 0
        self.num_arrived = 0
        self._wanted_bytes = 0
        self._discarding = False
        self._ending = False
        self._in_flight: deque[bytes | None] = deque()
        self._last_arrival = 0.0
        self._num_held = 0
        self._reader: asyncio.Future[None] | None = None
        self._writers: deque[asyncio.Future[None]] = deque()
        self.on_end: Callable[[], None] | None = None

    @property
    def full(self) -> bool:
        """Whether a writer must wait; a reader that waits for more than the buffer holds gets it."""
        return self.undelivered_bytes > max(self.medium.model.buffer_bytes, self._wanted_bytes)

    def put(self, data: bytes) -> None:
        """Send ``data`` (at most one quantum)."""
        self.undelivered_bytes += len(data)
        self.medium.record("write", self.source.name, self.target.name, self.flow, len(data))
        self.source.uplink.send(self.flow, len(data), lambda: self._leave(data))

    def end(self) -> None:
        """Let the reader see the end after all that was put."""
        if not self._ending:
            self._ending = True
            self.source.uplink.send(self.flow, 0, lambda: self._leave(None))

    def cut_short(self) -> None:
        """Drop what has not left the source, and let the reader see the end after the rest."""
        self.source.uplink.drop(self.flow)
        self._ending = True
        self._leave(None)

    def end_now(self) -> None:
        """Let the reader see the end at once: its own side gave up the connection."""
        self._ending = True
        self._in_flight.clear()
        self._num_held = 0
        self._arrive_end()

    def discard(self) -> None:
        """Nobody reads any more: drop what is here and what comes."""
        self._discarding = True
        self._consume(len(self.buffer))
        self.buffer.clear()
        self.wake()

    async def wait_for_room(self) -> None:
        """Block while `full`, unless woken; the caller checks why."""
        waiter = self.medium.loop.create_future()
        self._writers.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._writers:
                self._writers.remove(waiter)

    async def wait_for_data(self, num_bytes: int) -> None:
        """Block until something arrived or ended, letting the writer send at least ``num_bytes`` in all."""
        self._wanted_bytes = num_bytes
        self._reader = self.medium.loop.create_future()
        if self._writers and not self.full:
            self._wake_writers()
        try:
            await self._reader
        finally:
            self._reader = None
            self._wanted_bytes = 0

    def take(self, num_bytes: int) -> bytes:
        """Remove ``num_bytes`` from the buffer."""
        if num_bytes == len(self.buffer):
            data = bytes(self.buffer)
            self.buffer.clear()
        else:
            data = bytes(memoryview(self.buffer)[:num_bytes])
            del self.buffer[:num_bytes]
        self._consume(num_bytes)
        return data

    def release_held(self) -> None:
        """The peers are connected again: what was held goes on."""
        num_held, self._num_held = self._num_held, 0
        for _ in range(num_held):
            self._schedule_arrival()

    def wake(self) -> None:
        """Let all that wait at this pipe look again."""
        self._wake_reader()
        self._wake_writers()

    def _consume(self, num_bytes: int) -> None:
        self.undelivered_bytes -= num_bytes
        if self._writers and not self.full:
            self._wake_writers()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _wake_writers(self) -> None:
        while self._writers:
            waiter = self._writers.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def _leave(self, data: bytes | None) -> None:
        self._in_flight.append(data)
        self._schedule_arrival()

    def _schedule_arrival(self) -> None:
        medium = self.medium
        latency = medium.latency(self.source, self.target)
        arrival = medium.loop.time() + medium.model.draw_delay(latency, medium.random)
        self._last_arrival = max(arrival, self._last_arrival)
        medium.loop.call_at(self._last_arrival, self._arrive, context=medium.context)

    def _arrive(self) -> None:
        if not self.medium.connected(self.source, self.target):
            self._num_held += 1
        elif self._in_flight:
            data = self._in_flight.popleft()
            if data is None:
                self.target.downlink.send(self.flow, 0, self._arrive_end)
            else:
                self.target.downlink.send(self.flow, len(data), lambda: self._arrive_data(data))

    def _arrive_data(self, data: bytes) -> None:
        if self.ended:
            return
        self.num_arrived += len(data)
        self.medium.record("deliver", self.source.name, self.target.name, self.flow, len(data))
        if self._discarding:
            self._consume(len(data))
            return
        self.buffer += data
        if len(self.buffer) >= self._wanted_bytes:
            self._wake_reader()

    def _arrive_end(self) -> None:
        if not self.ended:
            self.ended = True
            self.medium.record("end", self.source.name, self.target.name, self.flow)
            self.wake()
            if self.on_end is not None:
                self.on_end()


class SimulatedStream(Stream):
    """One end of a stream between two simulated peers; see `Stream`."""

    def __init__(self, outgoing: Pipe, incoming: Pipe) -> None:
        self._out = outgoing
        self._in = incoming
        self._over = False
        incoming.on_end = outgoing.wake

    @property
    def remote(self) -> PeerId:
        """The id of the peer at the other end."""
        return self._in.source.peer_id

    @property
    def num_arrived(self) -> int:
        """See `Stream.num_arrived`."""
        return self._in.num_arrived

    @property
    def number(self) -> int:
        """Numbers the streams of a network."""
        return self._out.flow

    @property
    def over(self) -> bool:
        """Whether this end was closed or aborted."""
        return self._over

    def _lost(self, what: str) -> PeerLostError:
        return PeerLostError(self.remote, "the stream was closed at this end" if self._over else what)

    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        """See `Stream.write`."""
        for part in parts:
            await self._write(memoryview(part).cast("B"))

    async def _write(self, view: memoryview) -> None:
        out = self._out
        quantum = min(out.source.uplink.quantum_bytes, out.target.downlink.quantum_bytes)
        for start in range(0, len(view), quantum):
            if self._over or self._in.ended:
                raise self._lost("the stream ended while something was written")
            out.put(bytes(view[start : start + quantum]))
            while out.full:
                await out.wait_for_room()
                if self._over or self._in.ended:
                    raise self._lost("the stream ended while something was written")

    async def read(self, num_bytes: int) -> bytes:
        """See `Stream.read`."""
        incoming = self._in
        while self._over or len(incoming.buffer) < num_bytes:
            if self._over or incoming.ended:
                raise self._lost("the stream ended")
            await incoming.wait_for_data(num_bytes)
        return incoming.take(num_bytes)

    async def close(self) -> None:
        """See `Stream.close`; what was written is still delivered while this peer lives."""
        if not self._over:
            self._finish()
            self._out.end()

    def abort(self) -> None:
        """See `Stream.abort`."""
        if not self._over:
            self._finish()
            self._out.cut_short()

    def _finish(self) -> None:
        self._over = True
        self._in.discard()
        self._out.wake()
        self._out.medium.forget(self.number, self._out.source)

    def reset(self) -> None:
        """The connection timed out: this end sees the end of the stream."""
        self._in.end_now()
        self._out.wake()

    def reconnect(self) -> None:
        """What was held on its way to this end goes on."""
        self._in.release_held()


def stream_pair(
    medium: Medium, number: int, first: Endpoint, second: Endpoint
) -> tuple[SimulatedStream, SimulatedStream]:
    """The two ends of a new stream, at ``first`` and at ``second``."""
    there, back = Pipe(medium, number, first, second), Pipe(medium, number, second, first)
    return SimulatedStream(there, back), SimulatedStream(back, there)
