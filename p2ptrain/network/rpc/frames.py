"""The wire format: frames on a stream, the messages inside them, and the counts and limits of their bytes.

A frame is ``u32 length (big endian) | u8 kind | payload``. A bulk buffer is any number of BULK frames and one BULK_END,
so the receiver can check its length. END is the last frame of the closing side. The other side answers it with ACK,
which confirms that all data arrived, unless its own END is on the way. ERROR refuses; its payload is a `Refusal`. PING
is the keepalive; its payload is the number of bytes that its sender has received since the channel began. A message is
a msgpack map with text keys.
"""

from __future__ import annotations

import asyncio
import struct
from enum import IntEnum
from typing import Annotated, TypeVar

import msgpack
from msgspec import Meta

from p2ptrain.buffers import Buffer
from p2ptrain.errors import IntegrityError, ProtocolError
from p2ptrain.network.schema import Message, from_wire, to_wire
from p2ptrain.network.transport import PeerId

T = TypeVar("T")

MAX_FRAME_BYTES = 1 << 20
"""The longest payload of a BULK frame."""
MAX_MESSAGE_BYTES = 16 << 20
"""The longest message; the receiver must ask for that much."""
MAX_REASON_CHARACTERS = 512
MAX_REASON_BYTES = 4 * MAX_REASON_CHARACTERS + 32

FRAME = struct.Struct(">IB")
COUNT = struct.Struct(">Q")
"""The payload of PING."""
BURST_SECONDS = 0.2
"""How far traffic may run ahead of the average rate."""


class Kind(IntEnum):
    MESSAGE = 1
    BULK = 2
    BULK_END = 3
    PING = 4
    END = 5
    ACK = 6
    ERROR = 7


class Refusal(Message, frozen=True):
    """Payload of an ERROR frame: the reason, as text for people; ``is_busy`` refuses one more stream for now."""

    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARACTERS)]
    is_busy: bool = False


def pack(message: object) -> bytes:
    """Return one message encoded; raises `ValueError` if it is too long or msgpack cannot encode it."""
    try:
        data: bytes = msgpack.packb(to_wire(message), use_bin_type=True)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"a message must hold plain values only: {error}") from error
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(data)} bytes: send more than {MAX_MESSAGE_BYTES} as bulk")
    return data


def unpack(data: Buffer, peer: PeerId, schema: type[T]) -> T:
    """Return a message from ``peer``, decoded as ``schema``.

    Raises `ProtocolError` if it is not a msgpack map with text keys, or does not fit the schema.
    """
    try:
        values = msgpack.unpackb(data, raw=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(peer, "sent bytes that are not a message") from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ProtocolError(peer, "sent a message that is not a map")
    try:
        return from_wire(schema, values)
    except IntegrityError as error:
        raise ProtocolError(peer, f"sent a malformed message: {error}") from error


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    return FRAME.pack(len(payload), kind) + payload


END = frame(Kind.END)
ACK = frame(Kind.ACK)


def ping_frame(num_arrived: int) -> bytes:
    return frame(Kind.PING, COUNT.pack(num_arrived))


def error_frame(reason: str, *, is_busy: bool = False) -> bytes:
    """Return an ERROR frame; the reason is truncated and made printable."""
    text = "".join(each if each.isprintable() else " " for each in reason[:MAX_REASON_CHARACTERS])
    return frame(Kind.ERROR, pack(Refusal(text, is_busy)))


class RateLimit:
    """Delays senders or receivers to keep an average rate; 0 sets no limit.

    The limit is a token bucket in its virtual scheduling form (GCRA, ITU-T I.371). It tracks the time at which all
    admitted bytes would have passed at the given rate. A transfer ahead of that by more than a burst waits. The order
    is first come, first served, with one frame or piece per channel, so channels take turns.
    """

    def __init__(self, bytes_per_second: float = 0.0) -> None:
        self._bytes_per_second = bytes_per_second
        self._through_at = 0.0

    async def take(self, num_bytes: int) -> None:
        """Wait until ``num_bytes`` more may pass; a cancelled wait still consumes them."""
        if not self._bytes_per_second:
            return
        now = asyncio.get_running_loop().time()
        self._through_at = max(self._through_at, now) + num_bytes / self._bytes_per_second
        wait_seconds = self._through_at - now - BURST_SECONDS
        if wait_seconds > 0:
            await asyncio.sleep(wait_seconds)


class Traffic:
    """Byte counts and rate limits of a peer's frames in both directions; counts include frame headers.

    The limits hold for all channels together, heartbeats exempt, downwards by backpressure; 0 sets no limit.
    """

    def __init__(self, up_bytes_per_second: float = 0.0, down_bytes_per_second: float = 0.0) -> None:
        self.sent = 0
        self.received = 0
        self.up = RateLimit(up_bytes_per_second)
        self.down = RateLimit(down_bytes_per_second)
