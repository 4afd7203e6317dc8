"""Streams between peers of one process: memory, where daemons would encrypt and copy for nobody.

A peer that takes part has a `Door`, found by its id among those on the same event loop. What goes through it are pairs
of `LocalSocket`, which behave as sockets do: bounded, so that a reader that does not read holds the writer back;
ordered; copied, so that what a writer changes afterwards is not seen; and an end says nothing about completeness. What
is above them (frames, heartbeats, end marks, deadlines, limits) does not know the difference. What goes over them is no
traffic: `p2ptrain.network.transport.Stream.is_local` says so to whoever counts.

Peers on other event loops of the process are reached as if they were elsewhere: to hand bytes from thread to thread
costs about what a socket does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from weakref import WeakKeyDictionary, WeakValueDictionary

from p2ptrain.network.transport import PeerId

AHEAD_BYTES = 1 << 20
"""What may lie between writer and reader: about what daemons and kernels hold of a stream."""

_PIECE_BYTES = 128
"""What a piece costs besides its bytes, so that a flood of tiny ones is bounded too."""

_NOWHERE = memoryview(bytearray())


class Door:
    """Where a peer takes streams from the others on its event loop, from its making until `close`.

    Args:
        peer_id: Whose door it is.
        accept: By protocol: takes the caller's id and the far end of a new stream. Looked at for each stream.
    """

    def __init__(self, peer_id: PeerId, accept: Mapping[str, Callable[[PeerId, LocalSocket], None]]) -> None:
        self._peer_id = peer_id
        self._accept = accept
        self._doors = _doors.setdefault(asyncio.get_running_loop(), WeakValueDictionary())
        self._doors[peer_id] = self

    def open(self, peer: PeerId, protocol: str) -> LocalSocket | None:
        """The near end of a stream to a peer on this event loop.

        Returns:
            None when ``peer`` is not there, has no door, or does not serve the protocol.
        """
        other = self._doors.get(peer)
        if other is None or other is self or self._doors.get(self._peer_id) is not self:
            return None
        accept = other._accept.get(protocol)
        if accept is None:
            return None
        near, far = socket_pair()
        accept(self._peer_id, far)
        return near

    def close(self) -> None:
        """Open and take no more streams; idempotent."""
        if self._doors.get(self._peer_id) is self:
            del self._doors[self._peer_id]


_doors: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakValueDictionary[PeerId, Door]] = WeakKeyDictionary()
"""The open doors. Each inner dictionary is used on its event loop alone."""


class LocalSocket:
    """One end of a stream in memory; the methods of `p2ptrain.network.libp2p.socket_stream.SocketStream`.

    One task may read at a time; several may write. A write that is cancelled ends the stream: a part may be through.
    """

    def __init__(self, outgoing: _Pipe, incoming: _Pipe) -> None:
        self._out = outgoing
        self._in = incoming

    @property
    def num_arrived(self) -> int:
        """Bytes that the other end wrote so far."""
        return self._in.num_arrived

    @property
    def is_closing(self) -> bool:
        """Whether nothing can be written any more."""
        return self._out.is_over

    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        """Write all of ``parts``; they are not referenced any more when this returns.

        Raises:
            OSError: One of the ends was closed.
        """
        await self._out.write(*parts)

    async def read(self, num_bytes: int) -> bytes:
        """Return exactly ``num_bytes`` bytes; see `read_into`."""
        whole = bytearray(num_bytes)
        await self.read_into(memoryview(whole))
        return bytes(whole)

    async def read_into(self, view: memoryview) -> None:
        """Fill ``view``, which nobody else may use until this returns or raises.

        Raises:
            EOFError: The stream ended first.
        """
        await self._in.read_into(view)

    async def close(self) -> None:
        """End the stream; the other end can still read what `write` had returned for."""
        self.abort()

    def abort(self) -> None:
        """End the stream at once; idempotent."""
        self._out.end()
        self._in.discard()


def socket_pair() -> tuple[LocalSocket, LocalSocket]:
    """Both ends of a new stream."""
    there, back = _Pipe(), _Pipe()
    return LocalSocket(there, back), LocalSocket(back, there)


class _Piece:
    """Bytes that nobody has read yet: in the writer's own buffer, or in a copy."""

    __slots__ = ("is_kept", "taken", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.is_kept = False
        self.taken: asyncio.Future[None] | None = None

    def keep(self) -> None:
        """Let go of the writer's buffer."""
        self.view, self.is_kept = memoryview(bytes(self.view)), True

    def settle(self) -> None:
        """Tell the writer, if it waits, that this was read or never will be."""
        if self.taken is not None and not self.taken.done():
            self.taken.set_result(None)


class _Pipe:
    """One direction of a stream. A reader that waits gets its bytes straight out of the writer's buffer.

    Attributes:
        num_arrived: Bytes written so far.
        is_over: Whether one of its ends was closed.
    """

    def __init__(self) -> None:
        self.num_arrived = 0
        self.is_over = False
        self._pieces: deque[_Piece] = deque()
        self._ahead_bytes = 0
        self._target = _NOWHERE
        self._arrival: asyncio.Future[None] | None = None

    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        """Return when all is read, or little enough is not."""
        self._check()
        pieces = [_Piece(memoryview(part).cast("B")) for part in parts if len(part)]
        num_bytes = sum(len(piece.view) for piece in pieces)
        self.num_arrived += num_bytes
        self._ahead_bytes += num_bytes + _PIECE_BYTES * len(pieces)
        self._pieces.extend(pieces)
        self._deliver()
        try:
            await asyncio.sleep(0)  # a reader that is about to ask for it saves the copy
            if pieces and len(pieces[-1].view):
                await self._leave(pieces)
        except asyncio.CancelledError:
            self.end()
            raise

    async def _leave(self, pieces: Sequence[_Piece]) -> None:
        """Copy what may lie here, or wait until it is read, or never will be."""
        self._check()
        if self._ahead_bytes <= AHEAD_BYTES:
            for piece in pieces:
                piece.keep()
            return
        pieces[-1].taken = asyncio.get_running_loop().create_future()
        await pieces[-1].taken
        if len(pieces[-1].view):
            self._check()

    def _check(self) -> None:
        if self.is_over:
            raise BrokenPipeError("the stream is closed")

    async def read_into(self, view: memoryview) -> None:
        self._target = view
        self._deliver()
        try:
            if len(self._target):
                if self.is_over:
                    raise EOFError("the stream ended")
                self._arrival = asyncio.get_running_loop().create_future()
                await self._arrival
        finally:
            self._target, self._arrival = _NOWHERE, None

    def end(self) -> None:
        """Nothing more comes: the reader gets what the writer has let go of, and then the end. Idempotent."""
        self.is_over = True
        kept = deque(takewhile(lambda piece: piece.is_kept, self._pieces))
        for piece in list(self._pieces)[len(kept) :]:
            piece.settle()
        self._pieces = kept
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_exception(EOFError("the stream ended"))

    def discard(self) -> None:
        """Nobody reads any more. Idempotent."""
        self.end()
        self._pieces.clear()

    def _deliver(self) -> None:
        """Move what was written to where the reader waits for it."""
        while self._pieces and len(self._target):
            piece = self._pieces[0]
            size = min(len(piece.view), len(self._target))
            self._target[:size] = piece.view[:size]
            self._target, piece.view = self._target[size:], piece.view[size:]
            self._ahead_bytes -= size
            if not len(piece.view):
                self._pieces.popleft()
                self._ahead_bytes -= _PIECE_BYTES
                piece.settle()
        if self._arrival is not None and not len(self._target) and not self._arrival.done():
            self._arrival.set_result(None)
