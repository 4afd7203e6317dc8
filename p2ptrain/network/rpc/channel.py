"""A two-way conversation between peers over one stream: frames, heartbeats, end marks, deadlines.

A `Channel` owns its `Stream`. It sends, hands received data to its owner, and ends the conversation::

    stream ──▶ FrameReader ──▶ Inbox ──▶ Channel.receive, receive_bytes       (`p2ptrain.network.rpc.receive`)
    stream ◀── Channel.send, send_bytes
    Heartbeat: PING after a time without writes; the channel fails after a silence timeout

`p2ptrain.network.rpc.frames` has the wire format.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from p2ptrain.buffers import Buffer
from p2ptrain.errors import DeadlineError, P2PTrainError, PeerLostError, PeerSilentError, ProtocolError
from p2ptrain.network.rpc.frames import ACK, END, FRAME, Kind, Traffic, error_frame, frame, pack, ping_frame, unpack
from p2ptrain.network.rpc.receive import FrameReader, Heartbeat, Inbox, Sink
from p2ptrain.network.transport import Stream
from p2ptrain.tasks import Tasks

T = TypeVar("T")

SEND_FRAME_BYTES = 256 * 1024
"""Size of the bulk frames written here: short for prompt cancellation, long for low overhead."""


PING_SECONDS = 3.0
"""Time without writes before a PING; < `SILENCE_SECONDS`."""
SILENCE_SECONDS = 10.0
"""Keepalive timeout: a peer silent for this long is lost."""
SEND_SECONDS = 60.0
"""Timeout for a live peer to make room for one more frame."""
LINGER_SECONDS = 30.0
"""Timeout of `Channel.close`, from the last progress that a live remote reported; > `SILENCE_SECONDS`.

p2pd hands on some 64 kB at a time, which take 13 s at 5 kB/s."""
LEAST_BYTES_PER_SECOND = 1000.0
"""Rate at which the remote must take the remaining bytes; otherwise `Channel.close` gives it up."""
INBOX_BYTES = 256 * 1024
"""Bound on the data read ahead of the owner."""


@dataclass(frozen=True)
class LeastRate:
    """Minimum rate of a sender over a window; by default about one bulk frame per `SEND_SECONDS`."""

    bytes_per_second: float = 4096.0
    window_seconds: float = 60.0


NEVER_SECONDS = 1e9


class Channel:
    """Messages and bulk buffers in both directions; created by `p2ptrain.network.rpc.endpoint.Rpc`.

    One task receives at a time; several may send. Any error kills the channel, except a `DeadlineError` of `receive`.
    Cancellation inside any method kills it too. Every later call then raises the error that killed it: `PeerLostError`
    (the stream ended, or the peer was silent), `PeerRefusedError` (``reason`` says why), `ProtocolError` or
    `DeadlineError`.

    Attributes:
        lost: Done once the remote has ended the channel or is lost; never carries an exception.
        last_progress: Loop time of the remote's last report that it received more; the channel's start before that.
        heartbeat: Its timeouts may be changed. A silent remote ends the channel with `PeerSilentError`.
    """

    def __init__(self, stream: Stream, traffic: Traffic, on_answer: Callable[[], None] = lambda: None) -> None:
        """``on_answer`` is called once, at the remote's first frame."""
        self.remote = stream.remote
        self._stream = stream
        self._traffic = traffic
        self._loop = asyncio.get_running_loop()
        self._failure: P2PTrainError | None = None
        self.lost: asyncio.Future[None] = self._loop.create_future()
        self._remote_ended = False
        self._closed = False
        self._last_word: bytes | None = None
        self._is_in_bulk = False
        self._acknowledged = False
        self._write_lock = asyncio.Lock()
        self._ping: asyncio.Task[None] | None = None
        self._lingering: asyncio.Timeout | None = None
        self._close_by = NEVER_SECONDS
        self._num_arrived_before = stream.num_arrived
        self._num_sent = 0
        self._num_received = 0
        self.last_progress = self._loop.time()
        self._inbox = Inbox(stream.remote, INBOX_BYTES)
        self.heartbeat = Heartbeat(stream, PING_SECONDS, SILENCE_SECONDS, self._on_ping_due, self._on_silence)
        self._frames = FrameReader(stream, self._inbox, self.heartbeat, traffic, self._on_ping, on_answer)
        self._tasks = Tasks(self._on_defect)
        self._reader = self._tasks.start(self._read(), f"read-{stream.remote[-8:]}")

    # Sending

    async def send(self, message: object, data: bytes = b"") -> None:
        """Send one message of any schema, and ``data`` after it as one bulk buffer, unless it is empty.

        Raises `ValueError` if it is too long or msgpack cannot encode it, `DeadlineError` if a live peer does not read.
        """
        head, is_short = frame(Kind.MESSAGE, pack(message)), 0 < len(data) <= SEND_FRAME_BYTES
        await self._write(head, *((FRAME.pack(len(data), Kind.BULK_END), data) if is_short else ()))
        if data and not is_short:
            await self.send_bytes(data)

    async def send_bytes(self, data: Buffer, *, more: bool = False) -> None:
        """Send one bulk buffer of any length without a copy; it must not change until this returns.

        ``more`` is True if the next call continues the same buffer; ``data`` must not be empty then. Raises as `send`.
        """
        view = memoryview(data).cast("B")
        last = max(0, len(view) - 1) // SEND_FRAME_BYTES
        last_kind = Kind.BULK if more else Kind.BULK_END
        for index in range(last + 1):
            payload = view[index * SEND_FRAME_BYTES : (index + 1) * SEND_FRAME_BYTES]
            kind = last_kind if index == last else Kind.BULK
            await self._write(FRAME.pack(len(payload), kind), payload, in_bulk=kind == Kind.BULK)

    async def _write(self, *parts: Buffer, in_bulk: bool = False) -> None:
        if self._failure is not None:
            raise self._failure
        num_bytes, is_written = sum(map(len, parts)), False
        try:
            # Outside the lock, so heartbeats continue; outside the deadline, which bounds the remote only.
            await self._traffic.up.take(num_bytes)
            async with asyncio.timeout(SEND_SECONDS), self._write_lock:
                if self._last_word is None:
                    self.heartbeat.wrote()
                    await self._put(*parts)
                    self.heartbeat.wrote()
                    self._is_in_bulk = in_bulk
                    is_written = True
        except TimeoutError:
            self._fail(DeadlineError(f"peer {self.remote[-8:]} took nothing for {SEND_SECONDS:g} s"))
        except P2PTrainError as error:
            # The remote's ERROR frame may still be in flight to the reader.
            await self._let_reader_finish()
            self._fail(error)
        except BaseException:
            self.abort()
            raise
        if self._failure is not None:
            raise self._failure
        if not is_written:  # No frame may follow the last one, so that the stream can be reused.
            raise PeerLostError(self.remote, "the channel has ended")

    async def _put(self, *parts: Buffer) -> None:
        """Write frames, under the write lock."""
        num_bytes = sum(map(len, parts))
        self._num_sent += num_bytes
        await self._stream.write(*parts)
        self._traffic.sent += num_bytes

    async def _let_reader_finish(self) -> None:
        if self._failure is None and not self._inbox.holds_back:
            await asyncio.wait([self._reader], timeout=1.0)

    # Receiving

    async def receive(self, schema: type[T], timeout_seconds: float, max_bytes: int = 65536) -> T:
        """Return the next message, of a schema or of the subclasses of a tagged base; see `p2ptrain.network.schema`.

        Raises:
            DeadlineError: No message in time; the channel stays usable.
            ProtocolError: The message exceeds ``max_bytes``, does not fit the schema, or is bulk data.
        """
        if not self._inbox:
            await self._wait(timeout_seconds, "a message", message_bytes=max_bytes)
            if not self._inbox and self._failure is not None:
                raise self._failure
        try:
            return unpack(self._inbox.pop_message(max_bytes), self.remote, schema)
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
            timeout_seconds: Deadline for the whole buffer; a miss kills the channel.
            into: Writable destination of ``num_bytes``, or None for a new bytearray. It may be partly filled on error.
            on_progress: Called with the number of bytes in place after each arrival; it must not raise.

        Raises:
            DeadlineError: The buffer was not complete in time.
            ProtocolError: The buffer has another length, or a message came instead.
        """
        result: bytearray | memoryview = bytearray(num_bytes) if into is None else into
        view = memoryview(result).cast("B")
        if len(view) != num_bytes:
            raise ValueError(f"into has {len(view)} bytes, expected {num_bytes}")
        sink = Sink(self.remote, view, on_progress)
        try:
            self._inbox.pour(sink)
        except ProtocolError as error:
            raise self._fail(error) from None
        if sink.complete:
            return result
        try:
            await self._wait(timeout_seconds, f"{num_bytes} bytes", sink=sink)
        except DeadlineError as error:
            raise self._fail(error) from None
        if not sink.complete and self._failure is not None:
            raise self._failure
        return result

    async def receive_steadily(self, into: memoryview, rate: LeastRate) -> None:
        """Fill ``into`` with the next bulk buffer, as `receive_bytes`, with a minimum rate in place of the deadline.

        Raises `DeadlineError` if less arrived in a window; the channel is dead then.
        """
        mark = 0
        try:
            async with asyncio.timeout(rate.window_seconds) as window:

                def on_progress(received: int) -> None:
                    nonlocal mark
                    if received - mark >= rate.bytes_per_second * rate.window_seconds:
                        mark = received
                        window.reschedule(self._loop.time() + rate.window_seconds)

                await self.receive_bytes(len(into), NEVER_SECONDS, into, on_progress=on_progress)
        except TimeoutError:
            raise DeadlineError(
                f"peer {self.remote[-8:]} sent less than {rate.bytes_per_second:g} bytes/s for"
                f" {rate.window_seconds:g} s"
            ) from None

    async def _wait(
        self, timeout_seconds: float, what: str, *, message_bytes: int = 0, sink: Sink | None = None
    ) -> None:
        """Wait until data arrived for the owner or the channel ended; raises if it had ended before."""
        if self._failure is not None:
            raise self._failure
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._inbox.wait(message_bytes=message_bytes, sink=sink)
        except TimeoutError:
            raise DeadlineError(f"peer {self.remote[-8:]} did not send {what} within {timeout_seconds:g} s") from None
        except asyncio.CancelledError:
            self.abort()
            raise

    async def _read(self) -> None:
        """Read all frames of the remote up to its last one, then settle the channel (the reader task)."""
        try:
            if await self._frames.read_all() == Kind.END:
                await self._on_end()
            elif self._closed:
                self._acknowledged = True
                self._failure = self._failure or PeerLostError(self.remote, "the channel was closed at this end")
                self._settle()
            else:
                raise ProtocolError(self.remote, "acknowledged an end that was not sent")
        except P2PTrainError as error:
            self._fail(error)

    async def _on_end(self) -> None:
        self._remote_ended = True
        if not self._closed:
            try:
                async with self._write_lock:
                    self._last_word = ACK
                    await self._put(ACK)
            except PeerLostError:
                pass  # The remote may close without waiting for the ACK.
        self._failure = self._failure or PeerLostError(self.remote, "ended the channel early")
        self._settle()

    # Heartbeat

    def _on_ping(self, num_received: int) -> None:
        num_received = min(num_received, self._num_sent)  # A remote may report more than there is.
        if num_received <= self._num_received:
            return
        self._num_received, self.last_progress = num_received, self._loop.time()
        if self._lingering is not None and not self._lingering.expired():
            self._lingering.reschedule(min(self.last_progress + LINGER_SECONDS, self._close_by))

    def _on_silence(self) -> None:
        quiet_seconds = self._loop.time() - self.heartbeat.last_heard()
        self._fail(PeerSilentError(self.remote, f"sent nothing for {quiet_seconds:.1f} s"))

    def _on_ping_due(self) -> None:
        if not self._write_lock.locked():
            self._ping = self._tasks.start(self._write_ping(), f"ping-{self.remote[-8:]}")

    async def _write_ping(self) -> None:
        try:
            async with self._write_lock:
                if self._last_word is None:
                    await self._put(ping_frame(self._stream.num_arrived - self._num_arrived_before))
                    self.heartbeat.wrote()
        except PeerLostError as error:
            await self._let_reader_finish()
            self._fail(error)

    # Ends

    def _settle(self) -> None:
        self.heartbeat.stop()
        if not self.lost.done():
            self.lost.set_result(None)
        self._inbox.wake_owner()

    def _on_defect(self, error: Exception) -> None:
        self._fail(PeerLostError(self.remote, f"this end of the channel failed ({error!r}): see the log"))

    def _fail(self, error: P2PTrainError) -> P2PTrainError:
        """Kill the channel; returns the first error, or a `ProtocolError` that followed the remote's end."""
        # The owner may find a malformed message in the queue after the remote has ended.
        if self._failure is None or (self._remote_ended and isinstance(error, ProtocolError)):
            self._failure = error
        self._settle()
        if not isinstance(error, ProtocolError):  # `refuse` still needs the stream to send the reason.
            self._stream.abort()
        for task in (self._reader, self._ping):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        return self._failure

    def abort(self) -> None:
        """End the channel at once; the remote sees `PeerLostError`. Idempotent."""
        self._closed = True
        self._inbox.close()
        self._fail(PeerLostError(self.remote, "the channel was aborted at this end"))
        self._stream.abort()

    async def abort_and_wait(self) -> None:
        self.abort()
        await self._tasks.join()

    async def refuse(self, reason: str) -> None:
        """Send a refusal with ``reason``, and end the channel as `close` does."""
        await self._finish(error_frame(reason))

    async def close(self, last: object | None = None) -> None:
        """End the channel once the remote has all data, or made no progress for `LINGER_SECONDS`.

        The remote must also take the data at `LEAST_BYTES_PER_SECOND`. Idempotent; raises no network
        errors. ``last`` is a last message, sent together with the end mark; `ValueError` as for `send`.
        """
        await self._finish(END if last is None else frame(Kind.MESSAGE, pack(last)) + END)

    async def interrupt(self, last: object, reason: str) -> None:
        """Close with a last message while another task still sends or receives.

        A half-sent bulk buffer turns the message into a refusal with ``reason``.
        """
        await self._finish(frame(Kind.MESSAGE, pack(last)) + END, error_frame(reason))

    async def _finish(self, last_frame: bytes, in_bulk: bytes = b"") -> None:
        if self._closed:
            await self._tasks.join()
            return
        self._closed = True
        self._inbox.close()
        remaining_bytes = self._num_sent + len(last_frame) - self._num_received
        self._close_by = self._loop.time() + LINGER_SECONDS + remaining_bytes / LEAST_BYTES_PER_SECOND
        try:
            if self._failure is None or self._remote_ended or isinstance(self._failure, ProtocolError):
                async with asyncio.timeout(LINGER_SECONDS) as self._lingering:
                    async with self._write_lock:
                        if self._last_word is None:
                            last_frame = in_bulk if in_bulk and self._is_in_bulk else last_frame
                            self._last_word = ACK if self._remote_ended and last_frame is END else last_frame
                            await self._put(self._last_word)
                    if not self.lost.done():
                        self._inbox.wake_reader()
                        await self.lost
                    self._lingering = None
                if self._acknowledged or (self._remote_ended and self._last_word is not None):
                    await self._stream.rest()  # Each end has the other's last word, so nothing is in flight.
                else:
                    await self._stream.close()
        except (TimeoutError, P2PTrainError):
            pass
        finally:
            self.abort()
        await self._tasks.join()
