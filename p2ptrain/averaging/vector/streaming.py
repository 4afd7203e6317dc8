"""Pipelined transfer of shares: encoding overlaps sending; checks and hashes overlap receiving.

On the wire a share is one bulk buffer. Its bytes do not depend on the cuts into pieces (`p2ptrain.codecs.base.Codec`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from p2ptrain.codecs import Codec, CodecError, Decoder
from p2ptrain.errors import ProtocolError
from p2ptrain.hashing import BulkHasher
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.runtime import Runtime
from p2ptrain.tasks import Tasks

if TYPE_CHECKING:
    import torch

PIECE_VALUES = 1 << 20
"""Length of a piece: long enough to hide the cost of a thread switch, short enough to overlap with the network."""


Check = Callable[[memoryview, int, int], None]
"""Called with (encoded piece, start, stop), offsets in values of the share; raises `CodecError` to refuse the piece."""


def cut(num_values: int, block_size: int, piece_values: int = PIECE_VALUES) -> list[tuple[int, int]]:
    """Return (start, stop) of each piece of a share, cut at multiples of ``block_size``."""
    step = max(block_size, piece_values // block_size * block_size)
    return [(low, min(low + step, num_values)) for low in range(0, num_values, step)]


class EncodedStream:
    """Encoded share that can be sent to any number of peers while it is still being produced.

    Attributes:
        data: The encoded share; complete after `grow` with its length.
    """

    def __init__(self, data: bytearray | memoryview) -> None:
        self.data = data
        self._ready = 0
        self._grew = asyncio.Event()

    def grow(self, ready: int) -> None:
        """Release the first ``ready`` bytes to senders; those bytes must not change afterwards."""
        self._ready = ready
        self._grew.set()
        self._grew = asyncio.Event()

    async def send(self, channel: Channel) -> None:
        """Send the whole share as one buffer, as its bytes become ready; see `Channel.send_bytes`."""
        view, sent = memoryview(self.data), 0
        while sent < len(view):
            while self._ready == sent:
                await self._grew.wait()
            ready = self._ready
            await channel.send_bytes(view[sent:ready], more=ready < len(view))
            sent = ready


async def send_encoded(
    channel: Channel, runtime: Runtime, codec: Codec, vector: torch.Tensor, check: Check
) -> memoryview:
    """Encode and send a part, encoding one piece ahead of the network; return the encoded part.

    The result is the vector's own memory if the codec has an `encoded_view` of it.

    Raises:
        CodecError: A value cannot be encoded, or ``check`` refuses it.
        PeerError, DeadlineError: See `Channel.send_bytes`.
    """
    view = codec.encoded_view(vector)
    encoded = runtime.buffers.lend(codec.encoded_bytes(len(vector))) if view is None else view

    async def encode(low: int, high: int) -> memoryview:
        piece = encoded[codec.encoded_bytes(low) : codec.encoded_bytes(high)]
        await runtime.offload(encode_piece, low, high, piece)
        return piece

    def encode_piece(low: int, high: int, piece: memoryview) -> None:
        if view is None:
            codec.part(low, high).encode_into(vector[low:high], piece)
        check(piece, low, high)

    first, *others = cut(len(vector), codec.block_size)
    async with Tasks() as tasks:
        ahead = tasks.call(encode(*first), "encode")
        for span in [*others, None]:
            piece = await ahead
            if span is not None:
                ahead = tasks.call(encode(*span), "encode")
            await channel.send_bytes(piece, more=span is not None)
    return encoded


async def receive_checked(
    channel: Channel,
    runtime: Runtime,
    codec: Decoder,
    num_values: int,
    timeout_seconds: float,
    check: Check,
    *,
    hashed: bool = True,
    on_progress: Callable[[int], None] = lambda filled: None,
) -> tuple[memoryview, bytes]:
    """Receive an encoded share, and check it while it arrives.

    Args:
        timeout_seconds: Timeout for the whole share.
        check: Called with each piece, in order.
        hashed: Whether to hash the share, which is most of the work.
        on_progress: Called with the number of bytes received so far.

    Returns:
        The share and its `bulk_hash`, or without ``hashed`` the hash of no bytes.

    Raises:
        ProtocolError: The share has the wrong length, or ``check`` refuses a value.
        PeerError, DeadlineError: See `Channel.receive_bytes`.
    """
    data = runtime.buffers.lend(codec.encoded_bytes(num_values))
    arriving = _Arriving(runtime, codec, num_values, data, check, hashed)

    def progress(filled: int) -> None:
        on_progress(filled)
        arriving.on_progress(filled)

    try:
        await channel.receive_bytes(len(data), timeout_seconds, data, on_progress=progress)
        return data, await arriving.finish()
    except CodecError as error:
        raise ProtocolError(channel.remote, f"sent values that are refused: {error}") from error
    finally:
        await arriving.close()


class _Arriving:
    """Checks complete pieces of a receive buffer in a pool thread, one call at a time."""

    def __init__(
        self, runtime: Runtime, codec: Decoder, num_values: int, data: memoryview, check: Check, hashed: bool
    ) -> None:
        self._data = data
        self._runtime = runtime
        self._codec = codec
        self._check_piece = check
        self._hashed = hashed
        self._left = cut(num_values, codec.block_size)
        self._hash = BulkHasher()
        self._tasks = Tasks()
        self._checking: asyncio.Task[None] | None = None

    def on_progress(self, filled: int) -> None:
        """Start a check of all complete pieces unless one is still running."""
        if self._checking is not None and not self._checking.done():
            return
        complete = [span for span in self._left if self._codec.encoded_bytes(span[1]) <= filled]
        if complete and (self._checking is None or self._checking.exception() is None):
            del self._left[: len(complete)]
            self._checking = self._tasks.call(self._runtime.offload(self._check, complete), "check")

    async def finish(self) -> bytes:
        """Check the rest of the full buffer; return the hash of the whole."""
        if self._checking is not None:
            await self._checking
        await self._runtime.offload(self._check, self._left)
        return self._hash.digest()

    async def close(self) -> None:
        """Cancel the running check, and raise its error if it is no `CodecError`."""
        await self._tasks.close()
        if self._checking is not None and not self._checking.cancelled():
            error = self._checking.exception()
            if error is not None and not isinstance(error, CodecError):
                raise error

    def _check(self, spans: list[tuple[int, int]]) -> None:
        for low, high in spans:
            piece = self._data[self._codec.encoded_bytes(low) : self._codec.encoded_bytes(high)]
            self._check_piece(piece, low, high)
            if self._hashed:
                self._hash.update(piece)
