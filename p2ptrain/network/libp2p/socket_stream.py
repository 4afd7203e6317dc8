"""A socket that receives bulk data directly into the reader's buffer.

asyncio's `StreamReader` copies each byte several times, which would dominate the event loop. This protocol gives the
kernel the reader's buffer while a reader waits for bulk data, and an internal buffer otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

BUFFER_BYTES = 64 * 1024
"""Size of the internal buffer; reading pauses while it is full."""
SMALL_BYTES = 4096
"""Reads up to this size go through the internal buffer; <= half of it."""


class SocketStream(asyncio.BufferedProtocol):
    """Exact reads and writes with back-pressure. One task may read at a time; several may write.

    ``on_connected`` is called with this object once it is connected.
    """

    _cut: type[Exception] = EOFError
    """The error of reads after EOF."""

    def __init__(
        self, on_connected: Callable[[SocketStream], None] | None = None, buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        self.num_arrived = 0
        self._on_connected = on_connected
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = memoryview(bytearray(buffer_bytes))
        self._start = self._end = self._wanted = 0
        self._target: memoryview | None = None
        self._arrival: asyncio.Future[None] | None = None
        self._is_paused = False
        self._ended: BaseException | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._gone: asyncio.Future[None] = self._loop.create_future()

    @property
    def is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    async def read(self, num_bytes: int) -> bytes:
        """Return exactly ``num_bytes`` bytes; raise as `read_into`."""
        whole = bytearray(num_bytes)
        await self.read_into(memoryview(whole))
        return bytes(whole)

    async def read_into(self, view: memoryview) -> None:
        """Fill ``view``, which the caller must not use meanwhile.

        Raises `EOFError` if the stream ended first, and `OSError` if the connection broke.
        """
        if len(view) <= SMALL_BYTES:  # What follows comes with it: a frame's header and its message in one read.
            view[:] = await self.peek(len(view))
            self.consume(len(view))
            return
        ready = min(len(view), self._end - self._start)
        view[:ready] = self._buffer[self._start : self._start + ready]
        self.consume(ready)
        if ready == len(view):
            return
        if self._ended is not None:
            raise self._ended
        self._target = view[ready:]
        self._arrival = self._loop.create_future()
        try:
            await self._arrival
        finally:
            self._target = self._arrival = None

    async def peek(self, num_bytes: int) -> memoryview:
        """Return the next bytes without consuming them; at most half of the buffer's size.

        Raises as `read_into`; cancellation loses no data.
        """
        while self._end - self._start < num_bytes:
            if self._ended is not None:
                raise self._ended
            self._wanted, self._arrival = num_bytes, self._loop.create_future()
            try:
                await self._arrival
            finally:
                self._arrival = None
        return self._buffer[self._start : self._start + num_bytes]

    def consume(self, num_bytes: int) -> None:
        """Drop the next ``num_bytes`` bytes of the buffer, and resume reading if it has room."""
        self._start += num_bytes
        if self._start == self._end:
            self._start = self._end = 0
        if self._is_paused and self._end - self._start <= len(self._buffer) // 2 and not self.is_closing:
            assert self._transport is not None
            self._is_paused = False
            self._transport.resume_reading()

    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        """Write ``parts``, which the caller may reuse when this returns; raise `OSError` on a broken connection."""
        if self._transport is None or self.is_closing:
            raise BrokenPipeError("the stream is closed")
        self._transport.writelines(parts)
        await self.drain()

    async def drain(self) -> None:
        """Wait until the kernel has taken all written data; raise `OSError` if the connection broke."""
        while not self._writable.is_set():
            await self._writable.wait()
        if self._gone.done():
            raise BrokenPipeError("the stream is closed")

    async def close(self) -> None:
        """Drain and close the connection; raise `OSError` if it broke first."""
        await self.drain()
        assert self._transport is not None
        self._transport.close()
        await self.wait_gone()

    def rest(self) -> bool:
        """Give the connection back after a stream's orderly end; False if the caller must close it."""
        return False

    async def wait_gone(self) -> None:
        await asyncio.shield(self._gone)

    def abort(self) -> None:
        """End the connection at once; idempotent."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it
        # uvloop does not copy, so `write` may return only when the caller's buffer is no longer referenced.
        self._transport.set_write_buffer_limits(high=0, low=0)
        if self._on_connected is not None:
            self._on_connected(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_reading(exc or self._cut("the stream ended"))
        self._writable.set()
        if not self._gone.done():
            self._gone.set_result(None)

    def eof_received(self) -> bool:
        self._end_reading(self._cut("the stream ended"))
        return True  # keep writing

    def _end_reading(self, error: BaseException) -> None:
        if self._ended is None:
            self._ended = error
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_exception(self._ended)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._target is not None and len(self._target):
            return self._target
        if self._end == len(self._buffer):
            # The front has room, or reading would be paused.
            left = self._end - self._start
            self._buffer[:left] = self._buffer[self._start : self._end]
            self._start, self._end = 0, left
        return self._buffer[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self.num_arrived += nbytes
        if self._target is not None and len(self._target):
            self._target = self._target[nbytes:]
            if not len(self._target) and self._arrival is not None and not self._arrival.done():
                self._arrival.set_result(None)
            return
        self._end += nbytes
        if self._end == len(self._buffer) and self._start == 0 and not self.is_closing:
            assert self._transport is not None
            self._is_paused = True
            self._transport.pause_reading()
        if self._arrival is not None and self._end - self._start >= self._wanted and not self._arrival.done():
            self._arrival.set_result(None)
