"""A conversation between two peers over one stream: frames, heartbeats, end marks, deadlines.

A `Channel` owns its `Stream`. A reader task takes frames off the stream as they come, so that a refusal or a heartbeat
is seen whatever the owner is doing; it holds at most about `ChannelLimits.inbox_bytes` and then stops reading, which
holds the sender back. A timer writes a PING when nothing else was written for a while, and fails the channel when
nothing was read for longer than any live peer stays silent.

Frames are described in `p2ptrain.network.frames`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from p2ptrain.errors import DeadlineError, P2PTrainError, PeerLostError, PeerRefusedError, ProtocolError
from p2ptrain.network.frames import (
    ACK,
    END,
    FRAME,
    MAX_FRAME_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_REASON_BYTES,
    PING,
    Buffer,
    Kind,
    Message,
    error_frame,
    frame,
    pack,
    unpack,
)
from p2ptrain.network.rates import RateLimit
from p2ptrain.network.transport import PeerId, Stream

PIECE_BYTES = 64 * 1024
"""What nobody waits for is read in pieces of this size."""

SEND_FRAME_BYTES = 256 * 1024
"""The bulk frames written here: short enough to keep cancellation prompt, long enough to cost nothing."""

EAGER_MESSAGE_BYTES = 64 * 1024
"""Longer messages are not read off the stream before the owner asks for them."""

_ITEM_BYTES = 128
"""What one item in the inbox costs besides its payload, so that a flood of tiny frames is bounded too."""


@dataclass(frozen=True)
class ChannelLimits:
    """Times and sizes that bound one channel."""

    ping_seconds: float = 3.0
    """A PING is written when nothing else was for this long."""
    silence_seconds: float = 10.0
    """A peer from which nothing came for this long is lost."""
    send_seconds: float = 60.0
    """How long a peer that is alive may take to make room for one more frame."""
    linger_seconds: float = 5.0
    """How long `Channel.close` waits for what it wrote to arrive."""
    inbox_bytes: int = 256 * 1024
    """What is read ahead of the owner."""


class Traffic:
    """Bytes of all frames that a peer wrote and read, headers included, and how fast it may write and read them."""

    def __init__(self, up: RateLimit | None = None, down: RateLimit | None = None) -> None:
        self.sent = 0
        self.received = 0
        self.up = up or RateLimit()
        self.down = down or RateLimit()


class _Sink:
    """Where the reader task puts bulk pieces while the owner waits for them."""

    __slots__ = ("complete", "filled", "on_progress", "view")

    def __init__(self, view: memoryview, on_progress: Callable[[int], None] | None) -> None:
        self.view = view
        self.on_progress = on_progress
        self.filled = 0
        self.complete = False

    def room(self, num_bytes: int) -> memoryview | None:
        """Where the next ``num_bytes`` belong; None when they are too many."""
        end = self.filled + num_bytes
        return self.view[self.filled : end] if end <= len(self.view) else None

    def take(self, piece: Buffer) -> bool:
        """Append ``piece``; False when there is no room for it."""
        room = self.room(len(piece))
        if room is None:
            return False
        room[:] = piece
        self.advance(len(piece))
        return True

    def advance(self, num_bytes: int) -> None:
        """Note that the next ``num_bytes`` are in place."""
        self.filled += num_bytes
        if self.on_progress is not None:
            self.on_progress(self.filled)


class Channel:
    """Messages and bulk buffers in both directions; made by `p2ptrain.network.rpc.Rpc`.

    One task receives at a time; several may send. After any error but a `DeadlineError` of `receive`, and after a
    cancellation inside any method, the channel is dead and every later call raises what killed it.
    """

    def __init__(self, stream: Stream, limits: ChannelLimits, traffic: Traffic) -> None:
        self._stream = stream
        self._limits = limits
        self._traffic = traffic
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[tuple[int, bytes]] = deque()
        self._inbox_bytes = 0
        self._sink: _Sink | None = None
        self._wanted_bytes = 0
        self._arrival: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._failure: P2PTrainError | None = None
        self._settled: asyncio.Future[None] = self._loop.create_future()
        self._remote_ended = False
        self._closed = False
        self._holds_back = False
        self._write_lock = asyncio.Lock()
        self._ping: asyncio.Task[None] | None = None
        now = self._loop.time()
        self._last_read = now
        self._num_arrived = 0
        self._last_write = now
        self._tick_due = now + limits.ping_seconds
        self._timer = self._loop.call_at(self._tick_due, self._tick)
        self._reader = self._loop.create_task(self._read_frames())

    @property
    def remote(self) -> PeerId:
        """The authenticated id of the peer at the other end."""
        return self._stream.remote

    @property
    def lost(self) -> asyncio.Future[None]:
        """Done when the remote has ended the channel or is lost; never carries an exception."""
        return self._settled

    # Sending

    async def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            ValueError: It is too long, or holds what msgpack cannot encode.
            PeerLostError, PeerRefusedError, ProtocolError: What ended the channel.
            DeadlineError: The peer is alive but takes nothing more.
        """
        await self._write(frame(Kind.MESSAGE, pack(message)))

    async def send_bytes(self, data: Buffer, *, more: bool = False) -> None:
        """Send one bulk buffer of any length without copying it; it must not change until this returns.

        Args:
            data: The buffer.
            more: Whether the buffer goes on with the next call; ``data`` is not empty then.

        Raises:
            PeerLostError, PeerRefusedError, ProtocolError: What ended the channel.
            DeadlineError: The peer is alive but takes nothing more.
        """
        view = memoryview(data).cast("B")
        last = max(0, len(view) - 1) // SEND_FRAME_BYTES
        last_kind = Kind.BULK if more else Kind.BULK_END
        for index in range(last + 1):
            payload = view[index * SEND_FRAME_BYTES : (index + 1) * SEND_FRAME_BYTES]
            header = FRAME.pack(len(payload), last_kind if index == last else Kind.BULK)
            await self._write(header, payload)

    async def _write(self, *parts: Buffer) -> None:
        if self._failure is not None:
            raise self._failure
        num_bytes = sum(map(len, parts))
        try:
            # Before the lock, so that heartbeats go out meanwhile, and before the deadline, which is the remote's.
            await self._traffic.up.take(num_bytes)
            async with asyncio.timeout(self._limits.send_seconds), self._write_lock:
                self._last_write = self._loop.time()
                await self._stream.write(*parts)
                self._traffic.sent += num_bytes
                self._last_write = self._loop.time()
        except TimeoutError:
            self._fail(DeadlineError(f"peer {self.remote[-8:]} took nothing for {self._limits.send_seconds:g} s"))
        except P2PTrainError as error:
            # The reason for which the remote closed may still be on its way to the reader.
            await self._let_reader_finish()
            self._fail(error)
        except BaseException:
            self.abort()
            raise
        if self._failure is not None:
            raise self._failure

    async def _let_reader_finish(self) -> None:
        if self._failure is None and self._room is None:
            await asyncio.wait([self._reader], timeout=1.0)

    # Receiving

    async def receive(self, timeout_seconds: float, max_bytes: int = 65536) -> Message:
        """Return the next message.

        Raises:
            DeadlineError: None came in time; the channel stays usable.
            PeerLostError: The stream ended, or the peer was silent for too long.
            PeerRefusedError: The peer refused; ``reason`` says why.
            ProtocolError: It is longer than ``max_bytes``, malformed, or bulk data.
        """
        if not self._inbox:
            self._wanted_bytes = max_bytes
            try:
                await self._wait(timeout_seconds, "a message")
            finally:
                self._wanted_bytes = 0
            if not self._inbox and self._failure is not None:
                raise self._failure
        kind, payload = self._pop()
        if kind != Kind.MESSAGE:
            raise self._fail(ProtocolError(self.remote, "sent bulk data where a message was due"))
        if len(payload) > max_bytes:
            raise self._fail(self._too_long(len(payload), max_bytes))
        try:
            return unpack(payload, self.remote)
        except ProtocolError as error:
            raise self._fail(error) from error.__cause__

    async def receive_bytes(
        self,
        num_bytes: int,
        timeout_seconds: float,
        into: memoryview | None = None,
        *,
        on_progress: Callable[[int], None] | None = None,
    ) -> bytearray | memoryview:
        """Return the next bulk buffer, which must have exactly ``num_bytes`` bytes.

        Args:
            num_bytes: The only length that is accepted.
            timeout_seconds: Deadline for the whole buffer; the channel is dead when it passes.
            into: Where to put it (writable, ``num_bytes`` long); a new bytearray when None. Holds a part of the data,
                or none, when this raises.
            on_progress: Called with the number of bytes in place whenever more came; it must not raise.

        Raises:
            DeadlineError: It did not all come in time.
            PeerLostError, PeerRefusedError: As `receive`.
            ProtocolError: It has another length, or a message came instead.
        """
        result: bytearray | memoryview = bytearray(num_bytes) if into is None else into
        view = memoryview(result).cast("B")
        if len(view) != num_bytes:
            raise ValueError(f"into has {len(view)} bytes, expected {num_bytes}")
        sink = _Sink(view, on_progress)
        while self._inbox:
            kind, piece = self._pop()
            self._pour(sink, kind, piece)
            if sink.complete:
                return result
        self._sink = sink
        try:
            await self._wait(timeout_seconds, f"{num_bytes} bytes")
        except DeadlineError as error:
            raise self._fail(error) from None
        finally:
            self._sink = None
        if not sink.complete and self._failure is not None:
            raise self._failure
        return result

    def _pour(self, sink: _Sink, kind: int, piece: bytes) -> None:
        """Move one inbox item into ``sink``, noting when the buffer is complete. Raises `ProtocolError`."""
        if kind == Kind.MESSAGE:
            raise self._fail(ProtocolError(self.remote, "sent a message where bulk data was due"))
        if not sink.take(piece):
            raise self._fail(self._wrong_length(sink))
        self._poured(sink, kind)

    def _poured(self, sink: _Sink, kind: int) -> None:
        if kind == Kind.BULK_END and sink.filled != len(sink.view):
            raise self._fail(self._wrong_length(sink))
        sink.complete = kind == Kind.BULK_END

    def _wrong_length(self, sink: _Sink) -> ProtocolError:
        return ProtocolError(self.remote, f"sent bulk data that is not {len(sink.view)} bytes long")

    def _pop(self) -> tuple[int, bytes]:
        item = self._inbox.popleft()
        self._inbox_bytes -= len(item[1]) + _ITEM_BYTES
        self._wake_reader()
        return item

    async def _wait(self, timeout_seconds: float, what: str) -> None:
        """Wait until something arrived for the owner, or the channel ended; raises what had ended it before."""
        if self._failure is not None:
            raise self._failure
        if self._arrival is not None:
            raise ValueError("only one task may receive from a channel at a time")
        self._arrival = self._loop.create_future()
        self._wake_reader()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._arrival
        except TimeoutError:
            raise DeadlineError(f"peer {self.remote[-8:]} sent no {what} within {timeout_seconds:g} s") from None
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            self._arrival = None

    def _wake_owner(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    # The reader task

    async def _read_frames(self) -> None:
        try:
            while await self._read_frame():
                pass
        except P2PTrainError as error:
            self._fail(error)

    async def _read_frame(self) -> bool:
        """Take one frame off the stream; False after the last."""
        length, kind = FRAME.unpack(await self._read(FRAME.size))
        if kind == Kind.MESSAGE:
            await self._read_message(length)
        elif kind in (Kind.BULK, Kind.BULK_END):
            await self._read_bulk(length, kind)
        elif kind == Kind.ERROR and length <= MAX_REASON_BYTES:
            reason = (await self._read(length)).decode("utf-8", "replace")
            raise PeerRefusedError(self.remote, reason)
        elif length:
            raise ProtocolError(self.remote, f"sent a frame of kind {kind} with {length} bytes")
        elif kind == Kind.END:
            await self._on_end()
            return False
        elif kind == Kind.ACK:
            if not self._closed:
                raise ProtocolError(self.remote, "acknowledged an end that was not sent")
            self._settle()
            return False
        elif kind != Kind.PING:
            raise ProtocolError(self.remote, f"sent a frame of unknown kind {kind}")
        return True

    async def _read(self, num_bytes: int) -> bytes:
        data = await self._stream.read(num_bytes)
        await self._on_read(num_bytes)
        return data

    async def _on_read(self, num_bytes: int) -> None:
        """Note that something came, and hold the sender back where this peer's rate is capped."""
        self._last_read = self._loop.time()
        self._traffic.received += num_bytes
        if num_bytes > FRAME.size:  # heartbeats do not wait
            self._holds_back = True
            await self._traffic.down.take(num_bytes)
            self._holds_back = False
            self._last_read = self._loop.time()

    async def _read_message(self, length: int) -> None:
        if length > MAX_MESSAGE_BYTES:
            raise self._too_long(length, MAX_MESSAGE_BYTES)
        if self._sink is not None:
            raise ProtocolError(self.remote, "sent a message where bulk data was due")
        await self._wait_for_room(length, wait_for_owner=length > EAGER_MESSAGE_BYTES)
        if self._wanted_bytes and length > self._wanted_bytes:
            raise self._too_long(length, self._wanted_bytes)
        parts = [await self._read(min(PIECE_BYTES, length - start)) for start in range(0, length, PIECE_BYTES)]
        if self._sink is not None:
            raise ProtocolError(self.remote, "sent a message where bulk data was due")
        self._deliver(Kind.MESSAGE, parts[0] if len(parts) == 1 else b"".join(parts))

    async def _read_bulk(self, length: int, kind: int) -> None:
        if length > MAX_FRAME_BYTES:
            raise self._too_long(length, MAX_FRAME_BYTES)
        if not length and kind == Kind.BULK:
            raise ProtocolError(self.remote, "sent an empty piece of bulk data")
        start = 0
        while True:
            size = length - start if self._sink is not None else min(PIECE_BYTES, length - start)
            start += size
            piece_kind = kind if start == length else Kind.BULK
            if self._sink is not None and size:
                await self._read_into_sink(self._sink, size, piece_kind)
            else:
                await self._wait_for_room(size, wait_for_owner=False)
                piece = await self._read(size) if size else b""
                if self._sink is None:
                    self._deliver(piece_kind, piece)
                else:
                    self._pour(self._sink, piece_kind, piece)
            if self._sink is not None and self._sink.complete:
                self._sink = None
                self._wake_owner()
            if start == length:
                return

    async def _read_into_sink(self, sink: _Sink, size: int, kind: int) -> None:
        """Read a piece of bulk data to where its owner wants it, without a copy."""
        room = sink.room(size)
        if room is None:
            raise self._fail(self._wrong_length(sink))
        await self._stream.read_into(room)
        await self._on_read(size)
        sink.advance(size)
        self._poured(sink, kind)

    def _deliver(self, kind: int, payload: bytes) -> None:
        if self._closed:
            return  # Nobody will receive it any more.
        self._inbox.append((kind, payload))
        self._inbox_bytes += len(payload) + _ITEM_BYTES
        self._wake_owner()

    async def _wait_for_room(self, size: int, *, wait_for_owner: bool) -> None:
        """Hold the sender back while the owner has enough to read, or until the owner asks for a long message."""
        while not self._closed and (
            (self._inbox and self._inbox_bytes + size > self._limits.inbox_bytes)
            or (wait_for_owner and (self._inbox or not self._wanted_bytes))
        ):
            self._room = self._loop.create_future()
            try:
                await self._room
            finally:
                self._room = None
                self._last_read = self._loop.time()

    def _wake_reader(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    async def _on_end(self) -> None:
        self._remote_ended = True
        if not self._closed:
            try:
                async with self._write_lock:
                    await self._stream.write(ACK)
                    self._traffic.sent += len(ACK)
            except PeerLostError:
                pass  # It closed and did not wait for the answer, as it may.
        self._failure = self._failure or PeerLostError(self.remote, "ended the channel early")
        self._settle()

    def _too_long(self, length: int, limit: int) -> ProtocolError:
        return ProtocolError(self.remote, f"sent a frame of {length} bytes where {limit} are allowed")

    # Heartbeat and end

    def _tick(self) -> None:
        now = self._loop.time()
        arrived = self._stream.num_arrived
        if now > self._tick_due + 1.0 or self._room is not None or self._holds_back or arrived > self._num_arrived:
            # This process was stopped itself, or chose not to read: that is no silence of the remote. Nor is a frame
            # that takes long to arrive.
            self._last_read = now
        self._num_arrived = arrived
        if now >= self._last_read + self._limits.silence_seconds:
            self._fail(PeerLostError(self.remote, f"sent nothing for {self._limits.silence_seconds:g} s"))
            return
        next_ping = self._last_write + self._limits.ping_seconds
        if now >= next_ping:
            next_ping = now + self._limits.ping_seconds
            if not self._write_lock.locked():
                self._ping = self._loop.create_task(self._write_ping())
        self._tick_due = min(next_ping, self._last_read + self._limits.silence_seconds)
        self._timer = self._loop.call_at(self._tick_due, self._tick)

    async def _write_ping(self) -> None:
        try:
            async with self._write_lock:
                await self._stream.write(PING)
                self._traffic.sent += len(PING)
                self._last_write = self._loop.time()
        except PeerLostError as error:
            await self._let_reader_finish()
            self._fail(error)

    def _settle(self) -> None:
        """The remote will say nothing more: let whoever waits for it know, and stop the heartbeat."""
        self._timer.cancel()
        if not self._settled.done():
            self._settled.set_result(None)
        self._wake_owner()

    def _fail(self, error: P2PTrainError) -> P2PTrainError:
        """Kill the channel; returns what killed it, which is ``error`` unless something did before."""
        # What the remote sent before it ended may turn out to be wrong when it is looked at.
        if self._failure is None or (self._remote_ended and isinstance(error, ProtocolError)):
            self._failure = error
        self._settle()
        if not isinstance(error, ProtocolError):  # `refuse` tells the remote what it did wrong.
            self._stream.abort()
        for task in (self._reader, self._ping):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        return self._failure

    def abort(self) -> None:
        """End the channel at once; the remote sees `PeerLostError`. Idempotent."""
        self._closed = True
        self._fail(PeerLostError(self.remote, "the channel was aborted at this end"))
        self._stream.abort()

    async def abort_and_wait(self) -> None:
        """`abort`, and return when no task of this channel is left."""
        self.abort()
        await self._stop()

    async def refuse(self, reason: str) -> None:
        """Tell the remote why nothing more will come, and end the channel as `close` does."""
        await self._finish(error_frame(reason))

    async def close(self, last: Message | None = None) -> None:
        """End the channel once the remote has all that was sent, or after `ChannelLimits.linger_seconds`.

        Idempotent; never raises for the network's sake.

        Args:
            last: One more message, which travels with the end mark.

        Raises:
            ValueError: ``last`` is too long, or holds what msgpack cannot encode.
        """
        await self._finish(END if last is None else frame(Kind.MESSAGE, pack(last)) + END)

    async def _finish(self, last_frame: bytes) -> None:
        if self._closed:
            await self._stop()
            return
        self._closed = True
        try:
            if self._failure is None or self._remote_ended or isinstance(self._failure, ProtocolError):
                async with asyncio.timeout(self._limits.linger_seconds):
                    async with self._write_lock:
                        if not self._remote_ended or last_frame is not END:
                            await self._stream.write(last_frame)
                            self._traffic.sent += len(last_frame)
                    if not self._settled.done():
                        self._wake_reader()
                        await self._settled
                await self._stream.close()
        except (TimeoutError, P2PTrainError):
            pass
        finally:
            self.abort()
        await self._stop()

    async def _stop(self) -> None:
        """Wait for the helper tasks, which are cancelled, to be gone."""
        tasks = [task for task in (self._reader, self._ping) if task is not None and not task.done()]
        if tasks:
            await asyncio.wait(tasks)
