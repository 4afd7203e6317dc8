"""What a channel has read and its owner has not received yet: bounded, so that a slow owner holds the sender back.

Two tasks meet here. The *reader* (`p2ptrain.network.rpc.frame_reader`) puts in what it takes off the stream; the
*owner* (`p2ptrain.network.rpc.channel`) takes it out. An owner that waits for a bulk buffer leaves a `Sink`, and the
reader then reads straight into the buffer, without a copy and without a queue between.

Nothing here knows of time or of streams: each side waits on a future that the other side resolves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from p2ptrain.errors import ProtocolError
from p2ptrain.network.rpc.frames import Buffer, Kind
from p2ptrain.network.transport import PeerId

_ITEM_BYTES = 128
"""What one item costs besides its payload, so that a flood of tiny frames is bounded too."""


def too_long(remote: PeerId, num_bytes: int, limit_bytes: int) -> ProtocolError:
    """The error for a frame of more bytes than are allowed."""
    return ProtocolError(remote, f"sent a frame of {num_bytes} bytes where {limit_bytes} are allowed")


class Sink:
    """Where one bulk buffer goes while its owner waits for it.

    Args:
        remote: Who sends it.
        view: Where its bytes belong; its length is the only one that is accepted.
        on_progress: Called with the number of bytes in place whenever more came.

    Attributes:
        complete: Whether the whole buffer is in place.
    """

    __slots__ = ("_filled", "_on_progress", "_remote", "_view", "complete")

    def __init__(self, remote: PeerId, view: memoryview, on_progress: Callable[[int], None] | None = None) -> None:
        self.complete = False
        self._remote = remote
        self._view = view
        self._on_progress = on_progress
        self._filled = 0

    def room(self, num_bytes: int) -> memoryview:
        """Where the next ``num_bytes`` belong; raises `ProtocolError` when they are too many."""
        end = self._filled + num_bytes
        if end > len(self._view):
            raise self._wrong_length()
        return self._view[self._filled : end]

    def advance(self, num_bytes: int, kind: int) -> None:
        """Note that the next ``num_bytes``, from a frame of ``kind``, are in place.

        Raises:
            ProtocolError: They were the last, and the buffer is not full.
        """
        self._filled += num_bytes
        if self._on_progress is not None:
            self._on_progress(self._filled)
        if kind == Kind.BULK_END and self._filled != len(self._view):
            raise self._wrong_length()
        self.complete = kind == Kind.BULK_END

    def take(self, kind: int, payload: Buffer) -> None:
        """Copy the payload of one frame to its place; raises `ProtocolError` when it does not belong there."""
        if kind == Kind.MESSAGE:
            raise ProtocolError(self._remote, "sent a message where bulk data was due")
        self.room(len(payload))[:] = payload
        self.advance(len(payload), kind)

    def _wrong_length(self) -> ProtocolError:
        return ProtocolError(self._remote, f"sent bulk data that is not {len(self._view)} bytes long")


class Inbox:
    """Messages and pieces of bulk data, in the order in which they came.

    Args:
        remote: Who sends them.
        max_bytes: What is held at the most, save for one item that is longer by itself.

    Attributes:
        num_bytes: What is held now.
        sink: Where the bulk data goes that the owner waits for; None while it waits for none.
        wanted_bytes: The longest message that the owner waits for; 0 while it waits for none.
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
        """Take out the first item, which must be a message of up to ``max_bytes``; raises `ProtocolError`."""
        kind, payload = self._pop()
        if kind != Kind.MESSAGE:
            raise ProtocolError(self._remote, "sent bulk data where a message was due")
        if len(payload) > max_bytes:
            raise too_long(self._remote, len(payload), max_bytes)
        return payload

    def pour(self, sink: Sink) -> None:
        """Move what is here into ``sink`` until that is complete, or nothing is left; raises `ProtocolError`."""
        while self._items and not sink.complete:
            sink.take(*self._pop())

    async def wait(self, *, message_bytes: int = 0, sink: Sink | None = None) -> None:
        """Return when something came for the owner, or `wake_owner` was called; wakes a reader that waits for it.

        Args:
            message_bytes: The longest message that the owner waits for, if it waits for one.
            sink: Where bulk data goes, if it waits for that; returns when it is complete.

        Raises:
            ValueError: Another task waits already.
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
        """Let the owner look again: something came, or nothing more will."""
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def close(self) -> None:
        """Nobody will receive any more: what comes from now on is dropped, and holds nobody back."""
        self._closed = True

    def _pop(self) -> tuple[int, bytes]:
        item = self._items.popleft()
        self.num_bytes -= len(item[1]) + _ITEM_BYTES
        self.wake_reader()
        return item

    # The reader's side

    @property
    def holds_back(self) -> bool:
        """Whether the reader waits for room."""
        return self._room is not None

    def has_room(self, num_bytes: int, *, if_wanted: bool = False) -> bool:
        """Whether ``num_bytes`` more may be read; with ``if_wanted``, only once the owner waits for a message."""
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
        """Let the reader look again whether there is room."""
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def put(self, kind: int, payload: bytes) -> None:
        """Hand over the payload of one frame, to where the owner waits for it; raises `ProtocolError`."""
        if self.sink is not None:
            self.sink.take(kind, payload)
            self.release_sink()
        elif not self._closed:
            self._items.append((kind, payload))
            self.num_bytes += len(payload) + _ITEM_BYTES
            self.wake_owner()

    def release_sink(self) -> None:
        """Give the owner its buffer back if that is complete."""
        if self.sink is not None and self.sink.complete:
            self.sink = None
            self.wake_owner()
