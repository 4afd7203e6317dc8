"""Bounded queue between a channel's reader task and its owner; a slow owner holds the sender back.

The reader (`p2ptrain.network.rpc.frame_reader`) puts items in, the owner (`p2ptrain.network.rpc.channel`) takes them
out. An owner that waits for a bulk buffer leaves a `Sink`, and the reader fills that buffer directly, without a copy.
The inbox has no timeouts and no streams: each side waits on a future that the other side resolves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from p2ptrain.errors import ProtocolError
from p2ptrain.network.rpc.frames import Buffer, Kind
from p2ptrain.network.transport import PeerId

_ITEM_BYTES = 128
"""Overhead charged per item, which also bounds a flood of tiny frames."""


def too_long(remote: PeerId, num_bytes: int, limit_bytes: int) -> ProtocolError:
    """Return the error for a frame longer than allowed."""
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
    """Queue of messages and pieces of bulk data, in order of arrival.

    It holds up to ``max_bytes``, or a single longer item. While the owner waits, ``sink`` is its bulk destination, and
    ``wanted_bytes`` the longest message that it accepts (0 for none).
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
