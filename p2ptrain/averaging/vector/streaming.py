"""Shares on the move: encoded while they are sent, checked and hashed while they arrive.

On the wire a share is one bulk buffer whatever is done here, and its bytes do not depend on where it is cut
(`p2ptrain.codecs.base.Codec`). Cutting lets the network and the pool's threads work at the same time.
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
"""Values in a piece: long enough that handing it to another thread costs nothing, short enough to overlap."""


Check = Callable[[memoryview, int, int], None]
"""(encoded piece, its first value in the share, the value after its last): raises `CodecError` to refuse it."""


def cut(num_values: int, block_size: int, piece_values: int = PIECE_VALUES) -> list[tuple[int, int]]:
    """(first value, value after the last) of the pieces of a share, cut at multiples of a codec's block."""
    step = max(block_size, piece_values // block_size * block_size)
    return [(low, min(low + step, num_values)) for low in range(0, num_values, step)]


class EncodedStream:
    """An encoded share that can be sent while it is being made, to any number of peers.

    Attributes:
        data: The encoded share; complete once `grow` was called with its length.
    """

    def __init__(self, data: bytearray | memoryview) -> None:
        self.data = data
        self._ready = 0
        self._grew = asyncio.Event()

    def grow(self, ready: int) -> None:
        """Let go of the first ``ready`` bytes; they must not change any more."""
        self._ready = ready
        self._grew.set()
        self._grew = asyncio.Event()

    async def send(self, channel: Channel) -> None:
        """Send the whole share as one buffer, waiting for what is not there yet; see `Channel.send_bytes`."""
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
    """Encode a part piece by piece, one piece ahead of what is sent; returns all of it encoded.

    That is the vector's own memory if the codec takes it as it is.

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
    """Receive an encoded share, checking it while it arrives: ``check`` is called with its pieces in order.

    Args:
        channel: Where it comes from.
        runtime: For checks and hashes.
        codec: How it is encoded.
        num_values: Its length.
        timeout_seconds: Deadline of the whole.
        check: Judges each piece.
        hashed: Whether to hash it, which is most of the work.
        on_progress: Told how many bytes are there.

    Returns:
        The share, and its `bulk_hash`; with ``hashed`` False that of nothing.

    Raises:
        ProtocolError: It has another length or holds values that ``check`` refuses.
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
    """Checks the complete pieces of a buffer that fills up, in a pool thread, one call at a time."""

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
        """Check what is complete, unless the check before is still running."""
        if self._checking is not None and not self._checking.done():
            return
        complete = [span for span in self._left if self._codec.encoded_bytes(span[1]) <= filled]
        if complete and (self._checking is None or self._checking.exception() is None):
            del self._left[: len(complete)]
            self._checking = self._tasks.call(self._runtime.offload(self._check, complete), "check")

    async def finish(self) -> bytes:
        """Check the rest of the buffer, which is full now; returns the hash of all of it."""
        if self._checking is not None:
            await self._checking
        await self._runtime.offload(self._check, self._left)
        return self._hash.digest()

    async def close(self) -> None:
        """Leave no task behind."""
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
