"""Counts the messages between peers by what they are for, between their `Rpc` and their transport.

A message is what is written at once and is more than a sign of life or an end mark: a request, a reply, a refusal, or a
piece of a bulk buffer. Its name is that of the call or channel that it belongs to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from p2ptrain.network.rpc.frames import FRAME, Kind, unpack
from p2ptrain.network.transport import PeerId, Stream, StreamHandler, Transport

_MARKS = {Kind.PING, Kind.END, Kind.ACK}


class Messages:
    """How many messages each peer sent and received, by name."""

    def __init__(self) -> None:
        self._handled: Counter[tuple[PeerId, str]] = Counter()

    def note(self, source: PeerId, target: PeerId, name: str) -> None:
        """Count one message at both ends."""
        self._handled[source, name] += 1
        self._handled[target, name] += 1

    def handled(self, peers: Iterable[PeerId], prefix: str = "") -> list[int]:
        """By peer: the messages that it sent or received, of those whose names begin so."""
        totals: Counter[PeerId] = Counter()
        for (peer, name), count in self._handled.items():
            if name.startswith(prefix):
                totals[peer] += count
        return [totals[peer] for peer in peers]

    def clear(self) -> None:
        """Begin anew."""
        self._handled.clear()


class CountingTransport(Transport):
    """A transport whose streams note what goes over them; each message once, by the side that writes it.

    Args:
        transport: Does the work.
        messages: Where to count.
    """

    def __init__(self, transport: Transport, messages: Messages) -> None:
        self.peer_id = transport.peer_id
        self._transport = transport
        self._messages = messages

    async def open(self, peer: PeerId, protocol: str, timeout_seconds: float, *, expected_bytes: int = 0) -> Stream:
        """See `Transport.open`."""
        stream = await self._transport.open(peer, protocol, timeout_seconds, expected_bytes=expected_bytes)
        return _CountingStream(stream, self.peer_id, self._messages)

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """See `Transport.serve`."""

        async def handle(stream: Stream) -> None:
            await handler(_CountingStream(stream, self.peer_id, self._messages))

        await self._transport.serve(protocol, handle)

    async def connect(self, addresses: Sequence[str], timeout_seconds: float) -> PeerId:
        """See `Transport.connect`."""
        return await self._transport.connect(addresses, timeout_seconds)

    async def addresses(self) -> list[str]:
        """See `Transport.addresses`."""
        return await self._transport.addresses()

    async def close(self) -> None:
        """See `Transport.close`."""
        await self._transport.close()


class _CountingStream(Stream):
    """One end of a stream; the first frame, whichever side wrote it, says what the stream is for."""

    def __init__(self, stream: Stream, own: PeerId, messages: Messages) -> None:
        self.remote = stream.remote
        self._stream = stream
        self._own = own
        self._messages = messages
        self._name: str | None = None
        self._reads = 0

    @property
    def num_arrived(self) -> int:
        return self._stream.num_arrived

    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        length, kind = FRAME.unpack_from(parts[0])
        if self._name is None:
            self._name = self._name_in(bytes(parts[0][FRAME.size : FRAME.size + length]))
        if kind not in _MARKS:
            self._messages.note(self._own, self.remote, self._name)
        await self._stream.write(*parts)

    async def read(self, num_bytes: int) -> bytes:
        data = await self._stream.read(num_bytes)
        self._reads += 1
        if self._name is None and self._reads == 2:  # The frame's length was first.
            self._name = self._name_in(data)
        return data

    async def read_into(self, view: memoryview) -> None:
        view[:] = await self.read(len(view))

    def _name_in(self, header: bytes) -> str:
        return str(unpack(header, self.remote, dict).get("name", "?"))

    async def close(self) -> None:
        await self._stream.close()

    async def rest(self) -> None:
        await self.close()

    def abort(self) -> None:
        self._stream.abort()
