"""Masked values on the wire: integers modulo 2^32 on a fixed grid, hidden by key streams.

A member multiplies each value by its share of the group's weight and by `Grid.scale`, rounds it to an integer, and adds
its masks modulo 2^32. So masked parts are as long as fp32, and their sum is exact. Shares sum to 1: no sum of values
within the range overflows. A mask is an AES-128-CTR stream, in which any part of a vector has its place: a mask of one
share costs nothing for the others.
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from p2ptrain.buffers import Buffer
from p2ptrain.codecs.base import CHUNK_VALUES, NOT_FINITE, Codec, CodecError, byte_array, check_vector, chunks
from p2ptrain.native.load import Function, load_functions

if TYPE_CHECKING:
    import torch

Words = npt.NDArray[np.uint32]
WORD_BYTES = 4
WORDS_PER_BLOCK = 4  # of AES
HEADROOM = 1 - 2.0**-16
"""Part of the integers' range that is used: the rest is for roundings of values and products."""
_HEADER, _STREAM = struct.Struct("<QQ"), struct.Struct("<16sQ")
_ZEROS = memoryview(bytes(WORD_BYTES * CHUNK_VALUES))


class Stream(NamedTuple):
    """A mask: an AES-128-CTR stream, added to each value or, if it is the ``negative`` of a pair, subtracted."""

    key: bytes
    negative: bool = False


def add_streams(words: Words, streams: Sequence[Stream], start: int) -> None:
    """Add masks to ``words`` in place, modulo 2^32; ``words[0]`` is value ``start`` of the vector.

    The first call may build the native library. Calls for `CHUNK_VALUES` at most stay in a core's cache.
    """
    if (native := native_masks()) is not None:
        add_natively(native, words, streams, start)
    else:
        add_by_openssl(words, streams, start)


def add_natively(native: Function, words: Words, streams: Sequence[Stream], start: int) -> None:
    source = _HEADER.pack(start, len(streams)) + b"".join(_STREAM.pack(*stream) for stream in streams)
    native(np.frombuffer(source, np.uint8).ctypes.data, words.ctypes.data, len(words), 1.0)


def add_by_openssl(words: Words, streams: Sequence[Stream], start: int) -> None:
    block, skipped = divmod(start, WORDS_PER_BLOCK)
    for stream in streams:
        encryptor = Cipher(algorithms.AES(stream.key), modes.CTR(block.to_bytes(16, "big"))).encryptor()
        encryptor.update(bytes(WORD_BYTES * skipped))
        for piece in chunks(len(words), CHUNK_VALUES):
            mask = np.empty(len(words[piece]), "<u4")
            encryptor.update_into(_ZEROS[: mask.nbytes], mask.data.cast("B"))
            (np.subtract if stream.negative else np.add)(words[piece], mask, out=words[piece])


@functools.cache
def native_masks() -> Function | None:
    """Return the native function that adds masks; None if there is none for this CPU, or if it adds other ones."""
    if (native := load_functions().get(MaskedCodec.name, {}).get("add")) is None:
        return None
    streams = [Stream(bytes([number]) * 16, number % 3 == 0) for number in range(40)]
    found, right = np.zeros((2, 999), "<u4")
    add_natively(native, found, streams, 5)
    add_by_openssl(right, streams, 5)
    return native if np.array_equal(found, right) else None


@dataclass(frozen=True)
class Grid:
    """The integers that stand for values of magnitude ``limit`` at most."""

    limit: float

    @property
    def scale(self) -> float:
        """Integers per unit."""
        return 2.0**31 * HEADROOM / self.limit

    def to_words(self, values: npt.NDArray[np.float32], share: float, out: Words) -> int:
        """Write ``share`` times the values, rounded to the grid, to ``out``; return how many were beyond the limit.

        Those count as the limit. Raises `CodecError` for a value that is not finite.
        """
        if not len(values):
            return 0
        least, greatest = float(values.min()), float(values.max())  # a NaN makes both NaN
        if not (np.isfinite(least) and np.isfinite(greatest)):
            raise CodecError(f"masked: {NOT_FINITE}")
        limit, beyond = np.float32(self.limit), 0
        if max(-least, greatest) > self.limit:
            beyond, values = int(np.count_nonzero(np.abs(values) > limit)), np.clip(values, -limit, limit)
        scaled = out.view("<f4")
        np.multiply(values, np.float32(share * self.scale), out=scaled)
        np.copyto(out.view("<i4"), np.rint(scaled, out=scaled), casting="unsafe")
        return beyond

    def to_values(self, words: Words, shares: float, out: npt.NDArray[np.float32]) -> None:
        """Write the mean to ``out``: the sum in ``words``, whose contributors had ``shares`` of the weight in total.

        Both may share their memory.
        """
        np.copyto(out, words.view("<i4"), casting="unsafe")
        np.multiply(out, np.float32(1.0 / (self.scale * shares)), out=out)


class MaskedCodec(Codec):
    """Integers that tell nothing without their masks: any bytes of the right length are valid, and have no norm."""

    name = "masked"
    lossy = True

    def encoded_bytes(self, num_values: int) -> int:
        return WORD_BYTES * num_values

    def validate(self, data: Buffer, num_values: int) -> None:
        self._array(data, num_values)

    def largest(self, data: Buffer, num_values: int) -> float:
        return 0.0

    def squared_norms(self, data: Buffer, num_values: int, step: int) -> list[float]:
        return [0.0] * -(-num_values // step)

    def words(self, data: Buffer, num_values: int) -> Words:
        """Return the integers, ``[num_values]``, without a copy."""
        return self._array(data, num_values).view("<u4")

    def encode_into(self, vector: torch.Tensor, out: bytearray | memoryview) -> None:
        raise NotImplementedError("only a member's own `MaskingCodec` encodes")

    def decode_into(self, data: Buffer, out: torch.Tensor) -> None:
        raise NotImplementedError("masked values do not decode")

    def accumulate_into(self, data: Buffer, weight: float, out: torch.Tensor) -> None:
        raise NotImplementedError("masked values do not decode")


MASKED = MaskedCodec()


@dataclass
class Clipped:
    """Counts one member's values beyond the range, in all threads."""

    number: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, number: int) -> None:
        with self._lock:
            self.number += number


class MaskingCodec(MaskedCodec):
    """Encodes one member's contribution to one attempt.

    Attributes:
        clipped: Values of the member that were beyond the range.
    """

    def __init__(self, grid: Grid, share: float, streams: Sequence[Stream], clipped: Clipped, start: int = 0) -> None:
        """
        Args:
            share: The member's share of the weight of the roster.
            start: Offset of the first value in the vector.
        """
        self._grid = grid
        self._share = share
        self._streams = streams
        self._start = start
        self.clipped = clipped

    def part(self, low: int, high: int) -> MaskingCodec:
        return MaskingCodec(self._grid, self._share, self._streams, self.clipped, self._start + low)

    def encode_into(self, vector: torch.Tensor, out: bytearray | memoryview) -> None:
        values = check_vector(vector).numpy()
        words = byte_array(out, self.encoded_bytes(len(values)), self.name).view("<u4")
        beyond = 0
        for piece in chunks(len(values), CHUNK_VALUES):
            beyond += self._grid.to_words(values[piece], self._share, words[piece])
            add_streams(words[piece], self._streams, self._start + piece.start)
        self.clipped.add(beyond)
