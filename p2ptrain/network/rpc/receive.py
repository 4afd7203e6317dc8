"""The receiving half of a channel: frames off the stream, a bounded queue for the owner, and signs of life.

::

    stream ──▶ FrameReader ──▶ Inbox or Sink ──▶ the owner
                    └──▶ Heartbeat

The reader reads ahead while the `Inbox` has room, so refusals and heartbeats arrive while the owner is busy. A full
inbox holds the sender back. An owner that waits for a bulk buffer leaves a `Sink`, which the reader fills directly,
without a copy. Unrequested bulk data is read in pieces, and a long message only once its owner asks for it. A peer that
announces a large frame therefore cannot exhaust memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from p2ptrain.buffers import Buffer
from p2ptrain.errors import PeerBusyError, PeerRefusedError, ProtocolError
from p2ptrain.network.rpc.frames import (
    COUNT,
    FRAME,
    MAX_FRAME_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_REASON_BYTES,
    Kind,
    Refusal,
    Traffic,
    unpack,
)
from p2ptrain.network.transport import PeerId, Stream

PIECE_BYTES = 64 * 1024
"""Piece size for data without a waiting owner."""
EAGER_MESSAGE_BYTES = 64 * 1024
"""A longer message stays on the stream until the owner asks for it."""
LATE_SECONDS = 1.0
"""A timer this late means that the process was suspended; silence then starts anew."""
LATE_SHARE = 0.25
"""The same bound as a share of the silence timeout; the smaller one applies."""
LOOKS = 8
"""Number of checks for unread bytes within one silence timeout."""
_ITEM_BYTES = 128
"""Overhead charged per item of an inbox, which also bounds a flood of tiny frames."""


def too_long(remote: PeerId, num_bytes: int, limit_bytes: int) -> ProtocolError:
    return ProtocolError(remote, f"sent a frame of {num_bytes} bytes where {limit_bytes} are allowed")


class Sink:
    """Destination of one bulk buffer while its owner waits for it; only data of exactly its length is accepted.

    ``on_progress`` is called with the number of bytes in place after each arrival.
    """

    __slots__ = ("_filled", "_on_progress", "_remote", "_view", "complete")

    def __init__(self, remote: PeerId, view: memoryview, on_progress: Callable[[int], None] | None = None) -> None:
        self.complete = False
        self._remote = remote
        self._view = view
        self._on_progress = on_progress
        self._filled = 0

    def room(self, num_bytes: int) -> memoryview:
        """Return the place of the next ``num_bytes``; raises `ProtocolError` if they exceed the buffer."""
        end = self._filled + num_bytes
        if end > len(self._view):
            raise self._wrong_length()
        return self._view[self._filled : end]

    def advance(self, num_bytes: int, kind: int) -> None:
        """Count ``num_bytes`` more as in place; raises `ProtocolError` if the data ended before the buffer is full."""
        self._filled += num_bytes
        if self._on_progress is not None:
            self._on_progress(self._filled)
        if kind == Kind.BULK_END and self._filled != len(self._view):
            raise self._wrong_length()
        self.complete = kind == Kind.BULK_END

    def take(self, kind: int, payload: Buffer) -> None:
        """Copy the payload of one frame into place; raises `ProtocolError` if it does not fit."""
        if kind == Kind.MESSAGE:
            raise ProtocolError(self._remote, "sent a message where bulk data was due")
        self.room(len(payload))[:] = payload
        self.advance(len(payload), kind)

    def _wrong_length(self) -> ProtocolError:
        return ProtocolError(self._remote, f"sent bulk data that is not {len(self._view)} bytes long")


class Inbox:
    """Queue of messages and pieces of bulk data, in order of arrival, from the reader task to the owner.

    It holds up to ``max_bytes``, or a single longer item. While the owner waits, ``sink`` is its bulk destination, and
    ``wanted_bytes`` the longest message that it accepts (0 for none). Each side waits on a future that the other side
    resolves.
    """

    def __init__(self, remote: PeerId, max_bytes: int) -> None:
        self.num_bytes = 0
        self.sink: Sink | None = None
        self.wanted_bytes = 0
        self._remote = remote
        self._max_bytes = max_bytes
        self._items: deque[tuple[int, bytes]] = deque()
        self._arrival: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._items)

    # The owner's side

    def pop_message(self, max_bytes: int) -> bytes:
        """Return the first item; raises `ProtocolError` if it is bulk data or longer than ``max_bytes``."""
        kind, payload = self._pop()
        if kind != Kind.MESSAGE:
            raise ProtocolError(self._remote, "sent bulk data where a message was due")
        if len(payload) > max_bytes:
            raise too_long(self._remote, len(payload), max_bytes)
        return payload

    def pour(self, sink: Sink) -> None:
        """Move queued items into ``sink`` until it is complete or the queue is empty; raises `ProtocolError`."""
        while self._items and not sink.complete:
            sink.take(*self._pop())

    async def wait(self, *, message_bytes: int = 0, sink: Sink | None = None) -> None:
        """Wait for an item, a complete ``sink``, or `wake_owner`; wakes a waiting reader.

        ``message_bytes`` is the longest accepted message, 0 for none. Raises `ValueError` if another task waits
        already.
        """
        if self._arrival is not None:
            raise ValueError("only one task may receive from a channel at a time")
        self._arrival = asyncio.get_running_loop().create_future()
        self.wanted_bytes, self.sink = message_bytes, sink
        self.wake_reader()
        try:
            await self._arrival
        finally:
            self.wanted_bytes, self.sink = 0, None
            self._arrival = None

    def wake_owner(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def close(self) -> None:
        """Drop all further items without holding the sender back; the owner receives no more."""
        self._closed = True

    def _pop(self) -> tuple[int, bytes]:
        item = self._items.popleft()
        self.num_bytes -= len(item[1]) + _ITEM_BYTES
        self.wake_reader()
        return item

    # The reader's side

    @property
    def holds_back(self) -> bool:
        """True if the reader waits for room."""
        return self._room is not None

    def has_room(self, num_bytes: int, *, if_wanted: bool = False) -> bool:
        """True if ``num_bytes`` more may be read; with ``if_wanted``, only while the owner waits for a message."""
        if self._closed:
            return True
        if self._items and self.num_bytes + num_bytes > self._max_bytes:
            return False
        return not if_wanted or (not self._items and self.wanted_bytes > 0)

    async def wait_for_room(self, num_bytes: int, *, if_wanted: bool = False) -> None:
        """Return once `has_room` holds."""
        while not self.has_room(num_bytes, if_wanted=if_wanted):
            self._room = asyncio.get_running_loop().create_future()
            try:
                await self._room
            finally:
                self._room = None

    def wake_reader(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def put(self, kind: int, payload: bytes) -> None:
        """Deliver the payload of one frame to the sink or the queue; raises `ProtocolError`."""
        if self.sink is not None:
            self.sink.take(kind, payload)
            self.release_sink()
        elif not self._closed:
            self._items.append((kind, payload))
            self.num_bytes += len(payload) + _ITEM_BYTES
            self.wake_owner()

    def release_sink(self) -> None:
        """Wake the owner if its sink is complete."""
        if self.sink is not None and self.sink.complete:
            self.sink = None
            self.wake_owner()


class FrameReader:
    """Takes frames off the stream, checks them, and hands them to the inbox.

    ``on_answer`` is called at the first frame, and ``on_ping`` with the number of bytes that the remote has received.
    """

    def __init__(
        self,
        stream: Stream,
        inbox: Inbox,
        heartbeat: Heartbeat,
        traffic: Traffic,
        on_ping: Callable[[int], None],
        on_answer: Callable[[], None],
    ) -> None:
        self._stream = stream
        self._inbox = inbox
        self._heartbeat = heartbeat
        self._traffic = traffic
        self._on_ping = on_ping
        self._on_answer: Callable[[], None] | None = on_answer
        self._remote = stream.remote

    async def read_all(self) -> Kind:
        """Read until the remote's last frame and return its kind, END or ACK.

        Raises:
            PeerLostError: The stream ended without a last frame.
            PeerRefusedError, PeerBusyError: The peer refused; ``reason`` says why.
            ProtocolError: A frame is malformed, too long, or unexpected by the owner.
        """
        while (kind := await self._read_frame()) not in (Kind.END, Kind.ACK):
            pass
        return kind

    async def _read_frame(self) -> Kind:
        length, kind = FRAME.unpack(await self._read(FRAME.size))
        if self._on_answer is not None:
            self._on_answer()
            self._on_answer = None
        if kind == Kind.MESSAGE:
            await self._read_message(length)
        elif kind in (Kind.BULK, Kind.BULK_END):
            await self._read_bulk(length, kind)
        elif kind == Kind.ERROR and length <= MAX_REASON_BYTES:
            refusal = unpack(await self._read(length), self._remote, Refusal)
            raise (PeerBusyError if refusal.is_busy else PeerRefusedError)(self._remote, refusal.reason)
        elif kind == Kind.PING and length == COUNT.size:
            (num_received,) = COUNT.unpack(await self._read(length))
            self._on_ping(num_received)
        elif length or kind == Kind.PING:
            raise ProtocolError(self._remote, f"sent a frame of kind {kind} with {length} bytes")
        elif kind not in (Kind.END, Kind.ACK):
            raise ProtocolError(self._remote, f"sent a frame of unknown kind {kind}")
        return Kind(kind)

    async def _read_message(self, length: int) -> None:
        if length > MAX_MESSAGE_BYTES:
            raise too_long(self._remote, length, MAX_MESSAGE_BYTES)
        if self._inbox.sink is not None:
            raise ProtocolError(self._remote, "sent a message where bulk data was due")
        await self._wait_for_room(length, if_wanted=length > EAGER_MESSAGE_BYTES)
        if 0 < self._inbox.wanted_bytes < length:
            raise too_long(self._remote, length, self._inbox.wanted_bytes)
        parts = [await self._read(min(PIECE_BYTES, length - start)) for start in range(0, length, PIECE_BYTES)]
        self._inbox.put(Kind.MESSAGE, parts[0] if len(parts) == 1 else b"".join(parts))

    async def _read_bulk(self, length: int, kind: int) -> None:
        if length > MAX_FRAME_BYTES:
            raise too_long(self._remote, length, MAX_FRAME_BYTES)
        if not length and kind == Kind.BULK:
            raise ProtocolError(self._remote, "sent an empty piece of bulk data")
        start, is_complete = 0, False
        while not is_complete:
            sink = self._inbox.sink
            size = length - start if sink is not None else min(PIECE_BYTES, length - start)
            start += size
            is_complete = start == length
            piece_kind = kind if is_complete else Kind.BULK
            if sink is not None and size:
                await self._stream.read_into(sink.room(size))
                await self._on_read(size)
                sink.advance(size, piece_kind)
                self._inbox.release_sink()
            else:
                await self._wait_for_room(size)
                self._inbox.put(piece_kind, await self._read(size) if size else b"")

    async def _wait_for_room(self, size: int, *, if_wanted: bool = False) -> None:
        """Hold the sender back until the inbox has room, or until the owner asks for a long message."""
        if not self._inbox.has_room(size, if_wanted=if_wanted):
            self._heartbeat.pause()
            await self._inbox.wait_for_room(size, if_wanted=if_wanted)
            self._heartbeat.resume()

    async def _read(self, num_bytes: int) -> bytes:
        data = await self._stream.read(num_bytes)
        await self._on_read(num_bytes)
        return data

    async def _on_read(self, num_bytes: int) -> None:
        """Record a read, and delay the next one to keep the download limit."""
        self._heartbeat.heard()
        self._traffic.received += num_bytes
        if num_bytes > COUNT.size:  # heartbeats are exempt
            self._heartbeat.pause()
            await self._traffic.down.take(num_bytes)
            self._heartbeat.resume()


class Heartbeat:
    """Keepalive timer of one stream, from its creation until `stop`.

    It calls ``ping``, which must not block or raise, after ``ping_seconds`` without writes, and ``silent`` once after
    ``silence_seconds`` of silence (a lower bound after `expect`). Silence does not count while this process was
    suspended, while this side does not read (`pause`), or while unread bytes arrive, as in a long frame.
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
        self._silent_at: Callable[[float], float] | None = None
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

    def beat(self, seconds: float) -> None:
        """Set the time without writes before ``ping``."""
        self._ping_seconds = seconds
        self._reschedule()

    def beat_within(self, seconds: float) -> None:
        """Call ``ping`` after this time without writes; from then on as before."""
        self._last_write = self._loop.time() - max(0.0, self._ping_seconds - seconds)
        self._reschedule()

    def expect(self, silence_seconds: float, silent_at: Callable[[float], float]) -> None:
        """Set a shorter silence timeout, with ``silence_seconds`` as its lower bound.

        The remote must `beat` more often. ``silent_at`` maps the time of the last sign of life to the timeout; both in
        loop time.
        """
        self._silence_seconds = silence_seconds
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
        if now > self._due + min(LATE_SECONDS, LATE_SHARE * self._silence_seconds):
            self.heard()
        if now >= self._silence_ends(self.last_heard()):
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
        look_at = min(self._silence_ends(self._last_heard), now + self._silence_seconds / LOOKS)
        self._due = max(now, min(self._last_write + self._ping_seconds, look_at))
        self._timer = self._loop.call_at(self._due, self._tick)

    def _silence_ends(self, last_heard: float) -> float:
        return last_heard + self._silence_seconds if self._silent_at is None else self._silent_at(last_heard)
