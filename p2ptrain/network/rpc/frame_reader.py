"""The reading half of a channel: takes frames off the stream, checks them, and hands them to the inbox.

It reads as far ahead as the `Inbox` has room, so that a refusal or a heartbeat is seen whatever the owner is doing,
and then stops, which holds the sender back. What nobody waits for is read in pieces, and a long message only once its
owner asks for it, so nobody can fill this peer's memory by announcing a large frame.
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
"""What nobody waits for is read in pieces of this size."""

EAGER_MESSAGE_BYTES = 64 * 1024
"""Longer messages are not read off the stream before the owner asks for them."""


class FrameReader:
    """Reads one stream to its end.

    Args:
        stream: Where frames come from.
        inbox: Where messages and bulk data go.
        heartbeat: Is told what was heard, and when this side does not read.
        traffic: Counts what was read, and says how fast this peer may.
    """

    def __init__(self, stream: Stream, inbox: Inbox, heartbeat: Heartbeat, traffic: Traffic) -> None:
        self._stream = stream
        self._inbox = inbox
        self._heartbeat = heartbeat
        self._traffic = traffic
        self._remote = stream.remote

    async def read_all(self) -> Kind:
        """Read until the remote's last frame, which is returned: END or ACK.

        Raises:
            PeerLostError: The stream ended without one.
            PeerRefusedError: The peer refused; ``reason`` says why.
            ProtocolError: A frame is malformed, too long, or not what the owner waits for.
        """
        while True:
            kind = await self._read_frame()
            if kind in (Kind.END, Kind.ACK):
                return kind

    async def _read_frame(self) -> Kind:
        """Take one frame off the stream and return its kind."""
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
        """Read a piece of bulk data to where its owner wants it, without a copy."""
        await self._stream.read_into(sink.room(size))
        await self._on_read(size)
        sink.advance(size, kind)
        self._inbox.release_sink()

    async def _wait_for_room(self, size: int, *, if_wanted: bool = False) -> None:
        """Hold the sender back while the owner has enough to read, or until it asks for a long message."""
        if not self._inbox.has_room(size, if_wanted=if_wanted):
            self._heartbeat.pause()
            await self._inbox.wait_for_room(size, if_wanted=if_wanted)
            self._heartbeat.resume()

    async def _read(self, num_bytes: int) -> bytes:
        data = await self._stream.read(num_bytes)
        await self._on_read(num_bytes)
        return data

    async def _on_read(self, num_bytes: int) -> None:
        """Note that something came, and hold the sender back where this peer's rate is capped."""
        self._heartbeat.heard()
        self._traffic.received += num_bytes
        if num_bytes > FRAME.size:  # heartbeats do not wait
            self._heartbeat.pause()
            await self._traffic.down.take(num_bytes)
            self._heartbeat.resume()
