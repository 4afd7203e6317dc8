"""A conversation between two peers over one stream: frames, heartbeats, end marks, deadlines.

A `Channel` owns its `Stream`. What it does itself is to send, to hand the owner what came, and to end in one of the
ways that there are. The rest is in modules of their own::

    stream ──▶ FrameReader ──▶ Inbox ──▶ Channel.receive, receive_bytes
               frame_reader    inbox
    stream ◀── Channel.send, send_bytes
    Heartbeat: PING after a while without writes, the end after a silence that no live peer keeps

Frames are described in `p2ptrain.network.frames`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from p2ptrain.errors import DeadlineError, P2PTrainError, PeerLostError, PeerSilentError, ProtocolError
from p2ptrain.network.frame_reader import FrameReader
from p2ptrain.network.frames import ACK, END, FRAME, PING, Buffer, Kind, Message, error_frame, frame, pack, unpack
from p2ptrain.network.heartbeat import Heartbeat
from p2ptrain.network.inbox import Inbox, Sink
from p2ptrain.network.rates import Traffic
from p2ptrain.network.transport import PeerId, Stream
from p2ptrain.tasks import Tasks

SEND_FRAME_BYTES = 256 * 1024
"""The bulk frames written here: short enough to keep cancellation prompt, long enough to cost nothing."""


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
        self._failure: P2PTrainError | None = None
        self._settled: asyncio.Future[None] = self._loop.create_future()
        self._remote_ended = False
        self._closed = False
        self._last_word: bytes | None = None
        self._is_in_bulk = False
        self._acknowledged = False
        self._write_lock = asyncio.Lock()
        self._ping: asyncio.Task[None] | None = None
        self._inbox = Inbox(stream.remote, limits.inbox_bytes)
        self._heartbeat = Heartbeat(
            stream, limits.ping_seconds, limits.silence_seconds, self._on_ping_due, self._on_silence
        )
        self._frames = FrameReader(stream, self._inbox, self._heartbeat, traffic)
        self._tasks = Tasks(self._on_defect)
        self._reader = self._tasks.start(self._read(), f"read-{stream.remote[-8:]}")

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
            kind = last_kind if index == last else Kind.BULK
            await self._write(FRAME.pack(len(payload), kind), payload, in_bulk=kind == Kind.BULK)

    async def _write(self, *parts: Buffer, in_bulk: bool = False) -> None:
        if self._failure is not None:
            raise self._failure
        num_bytes, is_written = sum(map(len, parts)), False
        try:
            # Before the lock, so that heartbeats go out meanwhile, and before the deadline, which is the remote's.
            await self._traffic.up.take(num_bytes)
            async with asyncio.timeout(self._limits.send_seconds), self._write_lock:
                if self._last_word is None:
                    self._heartbeat.wrote()
                    await self._stream.write(*parts)
                    self._traffic.sent += num_bytes
                    self._heartbeat.wrote()
                    self._is_in_bulk = in_bulk
                    is_written = True
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
        if not is_written:  # Nothing follows the last word, so that the stream can rest.
            raise PeerLostError(self.remote, "the channel has ended")

    async def _let_reader_finish(self) -> None:
        if self._failure is None and not self._inbox.holds_back:
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
            await self._wait(timeout_seconds, "a message", message_bytes=max_bytes)
            if not self._inbox and self._failure is not None:
                raise self._failure
        try:
            return unpack(self._inbox.pop_message(max_bytes), self.remote)
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

    async def _wait(
        self, timeout_seconds: float, what: str, *, message_bytes: int = 0, sink: Sink | None = None
    ) -> None:
        """Wait until something arrived for the owner, or the channel ended; raises what had ended it before."""
        if self._failure is not None:
            raise self._failure
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._inbox.wait(message_bytes=message_bytes, sink=sink)
        except TimeoutError:
            raise DeadlineError(f"peer {self.remote[-8:]} sent no {what} within {timeout_seconds:g} s") from None
        except asyncio.CancelledError:
            self.abort()
            raise

    async def _read(self) -> None:
        """The reader task: read what the remote sends until its last frame, and see to how it ended."""
        try:
            if await self._frames.read_all() == Kind.END:
                await self._on_end()
            elif self._closed:
                self._acknowledged = True
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
                    await self._stream.write(ACK)
                    self._traffic.sent += len(ACK)
            except PeerLostError:
                pass  # It closed and did not wait for the answer, as it may.
        self._failure = self._failure or PeerLostError(self.remote, "ended the channel early")
        self._settle()

    # Heartbeat

    def beat(self, seconds: float) -> None:
        """Write a PING whenever nothing else was written for this time, instead of `ChannelLimits.ping_seconds`."""
        self._heartbeat.set_ping(seconds)

    def expect_beats(self, silence_seconds: float, silent_at: Callable[[float], float]) -> None:
        """Take the remote, which must `beat` more often, for lost sooner than `ChannelLimits.silence_seconds` says.

        After that every call raises `PeerSilentError`.

        Args:
            silence_seconds: The shortest silence that counts.
            silent_at: When the remote counts as silent, by when it was last heard on this channel; in loop time.
        """
        self._heartbeat.set_silence(silence_seconds, silent_at)

    @property
    def last_heard(self) -> float:
        """When the last sign of life of the remote came, in the loop's time."""
        return self._heartbeat.last_heard()

    def _on_silence(self) -> None:
        self._fail(PeerSilentError(self.remote, f"sent nothing for {self._loop.time() - self.last_heard:.1f} s"))

    def _on_ping_due(self) -> None:
        if not self._write_lock.locked():
            self._ping = self._tasks.start(self._write_ping(), f"ping-{self.remote[-8:]}")

    async def _write_ping(self) -> None:
        try:
            async with self._write_lock:
                if self._last_word is None:
                    await self._stream.write(PING)
                    self._traffic.sent += len(PING)
                    self._heartbeat.wrote()
        except PeerLostError as error:
            await self._let_reader_finish()
            self._fail(error)

    # Ends

    def _settle(self) -> None:
        """The remote will say nothing more: let whoever waits for it know, and stop the heartbeat."""
        self._heartbeat.stop()
        if not self._settled.done():
            self._settled.set_result(None)
        self._inbox.wake_owner()

    def _on_defect(self, error: Exception) -> None:
        self._fail(PeerLostError(self.remote, f"this end of the channel failed ({error!r}): see the log"))

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
        self._inbox.close()
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

    async def interrupt(self, last: Message, reason: str) -> None:
        """As `close` with a last message, while another task still sends or receives.

        Args:
            last: The message.
            reason: What the remote is refused with instead where a bulk buffer is half sent.
        """
        await self._finish(frame(Kind.MESSAGE, pack(last)) + END, error_frame(reason))

    async def _finish(self, last_frame: bytes, in_bulk: bytes = b"") -> None:
        if self._closed:
            await self._stop()
            return
        self._closed = True
        self._inbox.close()
        try:
            if self._failure is None or self._remote_ended or isinstance(self._failure, ProtocolError):
                async with asyncio.timeout(self._limits.linger_seconds):
                    async with self._write_lock:
                        last_frame = in_bulk if in_bulk and self._is_in_bulk else last_frame
                        if not self._remote_ended or last_frame is not END:
                            self._last_word = last_frame
                            await self._stream.write(last_frame)
                            self._traffic.sent += len(last_frame)
                    if not self._settled.done():
                        self._inbox.wake_reader()
                        await self._settled
                if self._acknowledged or self._last_word is ACK:
                    await self._stream.rest()
                else:
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
