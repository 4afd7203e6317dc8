"""Streams between simulated peers: ordered bytes with latency, backpressure, and every kind of end.

Data queues on the sender's uplink, travels for the latency, queues on the receiver's downlink, and waits in a buffer
for the reader. The unread data is bounded; beyond the bound the writer blocks. While the peers are disconnected, data
in flight is held; it continues once they reconnect.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from p2ptrain.errors import PeerLostError
from p2ptrain.network.transport import Stream

if TYPE_CHECKING:
    from p2ptrain.network.simulated.network import SimulatedNetwork, SimulatedPeer


class Pipe:
    """One direction of a stream."""

    def __init__(self, network: SimulatedNetwork, flow: int, source: SimulatedPeer, target: SimulatedPeer) -> None:
        self.network = network
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
        """True if a writer must wait; a reader that waits for more than the buffer holds raises the bound."""
        return self.undelivered_bytes > max(self.network.model.buffer_bytes, self._wanted_bytes)

    def put(self, data: bytes) -> None:
        """Send ``data`` (at most one quantum)."""
        self.undelivered_bytes += len(data)
        self.network.record("write", self.source.name, self.target.name, self.flow, len(data))
        self.source.uplink.send(self.flow, len(data), lambda: self._leave(data))

    def end(self) -> None:
        """Queue the end of the stream behind all sent data."""
        if not self._ending:
            self._ending = True
            self.source.uplink.send(self.flow, 0, lambda: self._leave(None))

    def cut_short(self) -> None:
        """Drop the data still at the source; the end follows the data in flight."""
        self.source.uplink.drop(self.flow)
        self._ending = True
        self._leave(None)

    def end_now(self) -> None:
        """End the stream at once, because the reader's own side gave up the connection."""
        self._ending = True
        self._in_flight.clear()
        self._num_held = 0
        self._arrive_end()

    def discard(self) -> None:
        """Drop all received data and all later data."""
        self._discarding = True
        self._consume(len(self.buffer))
        self.buffer.clear()
        self.wake()

    async def wait_for_room(self) -> None:
        """Block while `full`, or until `wake`; the caller checks the cause."""
        waiter = self.network.loop.create_future()
        self._writers.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._writers:
                self._writers.remove(waiter)

    async def wait_for_data(self, num_bytes: int) -> None:
        """Block until data or the end arrived; the writer may send at least ``num_bytes`` in all."""
        self._wanted_bytes = num_bytes
        self._reader = self.network.loop.create_future()
        if self._writers and not self.full:
            self._wake_writers()
        try:
            await self._reader
        finally:
            self._reader = None
            self._wanted_bytes = 0

    def take(self, num_bytes: int) -> bytes:
        if num_bytes == len(self.buffer):
            data = bytes(self.buffer)
            self.buffer.clear()
        else:
            data = bytes(memoryview(self.buffer)[:num_bytes])
            del self.buffer[:num_bytes]
        self._consume(num_bytes)
        return data

    def release_held(self) -> None:
        """Resume delivery of the held data after a reconnect."""
        num_held, self._num_held = self._num_held, 0
        for _ in range(num_held):
            self._schedule_arrival()

    def wake(self) -> None:
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
        network = self.network
        latency = network.latency(self.source, self.target)
        arrival = network.loop.time() + network.model.draw_delay(latency, network.random)
        self._last_arrival = max(arrival, self._last_arrival)
        network.loop.call_at(self._last_arrival, self._arrive, context=network.context)

    def _arrive(self) -> None:
        if not self.network.connected(self.source, self.target):
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
        self.network.record("deliver", self.source.name, self.target.name, self.flow, len(data))
        if self._discarding:
            self._consume(len(data))
            return
        self.buffer += data
        if len(self.buffer) >= self._wanted_bytes:
            self._wake_reader()

    def _arrive_end(self) -> None:
        if not self.ended:
            self.ended = True
            self.network.record("end", self.source.name, self.target.name, self.flow)
            self.wake()
            if self.on_end is not None:
                self.on_end()


class SimulatedStream(Stream):
    """One end of a stream.

    Attributes:
        number: The stream's number within its network.
        over: True if this end was closed or aborted.
    """

    def __init__(self, outgoing: Pipe, incoming: Pipe) -> None:
        self.remote = incoming.source.peer_id
        self.number = outgoing.flow
        self.over = False
        self.outgoing = outgoing
        self.incoming = incoming
        incoming.on_end = outgoing.wake

    @property
    def num_arrived(self) -> int:
        return self.incoming.num_arrived

    def _lost(self, what: str) -> PeerLostError:
        return PeerLostError(self.remote, "the stream was closed at this end" if self.over else what)

    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        for part in parts:
            await self._write(memoryview(part).cast("B"))

    async def _write(self, view: memoryview) -> None:
        out = self.outgoing
        quantum = min(out.source.uplink.quantum_bytes, out.target.downlink.quantum_bytes)
        for start in range(0, len(view), quantum):
            if self.over or self.incoming.ended:
                raise self._lost("the stream ended while something was written")
            out.put(bytes(view[start : start + quantum]))
            while out.full:
                await out.wait_for_room()
                if self.over or self.incoming.ended:
                    raise self._lost("the stream ended while something was written")

    async def read(self, num_bytes: int) -> bytes:
        incoming = self.incoming
        while self.over or len(incoming.buffer) < num_bytes:
            if self.over or incoming.ended:
                raise self._lost("the stream ended")
            await incoming.wait_for_data(num_bytes)
        return incoming.take(num_bytes)

    async def read_into(self, view: memoryview) -> None:
        view[:] = await self.read(len(view))

    async def close(self) -> None:
        """See `Stream.close`; written data is still delivered while this peer lives."""
        if not self.over:
            self._finish()
            self.outgoing.end()

    async def rest(self) -> None:
        await self.close()

    def abort(self) -> None:
        if not self.over:
            self._finish()
            self.outgoing.cut_short()

    def _finish(self) -> None:
        self.over = True
        self.incoming.discard()
        self.outgoing.wake()
        self.outgoing.network.forget(self.number, self.outgoing.source)

    def reset(self) -> None:
        """End this side of the stream after a connection timeout."""
        self.incoming.end_now()
        self.outgoing.wake()
