"""The reading half of a channel: takes frames off the stream, checks them, and hands them to the inbox.

It reads ahead while the `Inbox` has room, so refusals and heartbeats arrive while the owner is busy. A full inbox
holds the sender back. Unrequested bulk data is read in pieces, and a long message only once its owner asks for it. A
peer that announces a large frame therefore cannot exhaust memory.
"""

from __future__ import annotations

from p2ptrain.errors import PeerRefusedError, ProtocolError
from p2ptrain.network.rpc.frames import (
    FRAME,
    MAX_FRAME_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_REASON_BYTES,
    Kind,
    Refusal,
    unpack,
)
from p2ptrain.network.rpc.heartbeat import Heartbeat
from p2ptrain.network.rpc.inbox import Inbox, Sink, too_long
from p2ptrain.network.rpc.rates import Traffic
from p2ptrain.network.transport import Stream

PIECE_BYTES = 64 * 1024
"""Piece size for data without a waiting owner."""

EAGER_MESSAGE_BYTES = 64 * 1024
"""A longer message stays on the stream until the owner asks for it."""


class FrameReader:
    def __init__(self, stream: Stream, inbox: Inbox, heartbeat: Heartbeat, traffic: Traffic) -> None:
        self._stream = stream
        self._inbox = inbox
        self._heartbeat = heartbeat
        self._traffic = traffic
        self._remote = stream.remote

    async def read_all(self) -> Kind:
        """Read until the remote's last frame and return its kind, END or ACK.

        Raises:
            PeerLostError: The stream ended without a last frame.
            PeerRefusedError: The peer refused; ``reason`` says why.
            ProtocolError: A frame is malformed, too long, or unexpected by the owner.
        """
        while True:
            kind = await self._read_frame()
            if kind in (Kind.END, Kind.ACK):
                return kind

    async def _read_frame(self) -> Kind:
        length, kind = FRAME.unpack(await self._read(FRAME.size))
        if kind == Kind.MESSAGE:
            await self._read_message(length)
        elif kind in (Kind.BULK, Kind.BULK_END):
            await self._read_bulk(length, kind)
        elif kind == Kind.ERROR and length <= MAX_REASON_BYTES:
            refusal = unpack(await self._read(length), self._remote, Refusal)
            raise PeerRefusedError(self._remote, refusal.reason)
        elif length:
            raise ProtocolError(self._remote, f"sent a frame of kind {kind} with {length} bytes")
        elif kind not in (Kind.PING, Kind.END, Kind.ACK):
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
        start = 0
        while True:
            sink = self._inbox.sink
            size = length - start if sink is not None else min(PIECE_BYTES, length - start)
            start += size
            piece_kind = kind if start == length else Kind.BULK
            if sink is not None and size:
                await self._read_into(sink, size, piece_kind)
            else:
                await self._wait_for_room(size)
                self._inbox.put(piece_kind, await self._read(size) if size else b"")
            if start == length:
                return

    async def _read_into(self, sink: Sink, size: int, kind: int) -> None:
        """Read a piece of bulk data straight into its owner's buffer."""
        await self._stream.read_into(sink.room(size))
        await self._on_read(size)
        sink.advance(size, kind)
        self._inbox.release_sink()

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
        if num_bytes > FRAME.size:  # heartbeats are exempt
            self._heartbeat.pause()
            await self._traffic.down.take(num_bytes)
            self._heartbeat.resume()
