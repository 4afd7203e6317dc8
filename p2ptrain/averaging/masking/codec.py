"""Masked values on the wire: integers modulo 2^32 on a fixed grid, hidden by key streams.

A member multiplies each value by its share of the group's weight and by `Grid.scale`, rounds it to an integer, and adds
its masks modulo 2^32. So masked parts are as long as fp32, and their sum is exact. Shares sum to 1: no sum of values
within the range overflows. A mask is an AES-128-CTR stream, in which any part of a vector has its place: a mask of one
share costs nothing for the others.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from p2ptrain.buffers import Buffer
from p2ptrain.codecs.base import CHUNK_VALUES, NOT_FINITE, Codec, CodecError, byte_array, check_vector, chunks

if TYPE_CHECKING:
    import torch

Words = npt.NDArray[np.uint32]
WORD_BYTES = 4
WORDS_PER_BLOCK = 4  # of AES
HEADROOM = 1 - 2.0**-16
"""Part of the integers' range that is used: the rest is for roundings of values and products."""


class Stream(NamedTuple):
    """A mask: an AES-128-CTR stream, added to each value or, if it is the ``negative`` of a pair, subtracted."""

    key: bytes
    negative: bool = False


class Masks:
    """The sum of masks, added to consecutive words of a vector, of which the first is value ``start``."""

    def __init__(self, streams: Sequence[Stream], start: int) -> None:
        block, skipped = divmod(start, WORDS_PER_BLOCK)
        self._zeros = memoryview(bytes(WORD_BYTES * CHUNK_VALUES))
        self._scratch = np.empty(CHUNK_VALUES, "<u4")
        self._ciphers = []
        for stream in streams:
            counter = modes.CTR(block.to_bytes(16, "big"))
            encryptor = Cipher(algorithms.AES(stream.key), counter).encryptor()
            encryptor.update(bytes(WORD_BYTES * skipped))
            self._ciphers.append((encryptor, np.subtract if stream.negative else np.add))

    def add_to(self, words: Words) -> None:
        """Add the next masks to ``words`` in place, modulo 2^32; at most `CHUNK_VALUES`, which stay in a cache."""
        scratch = self._scratch[: len(words)]
        for encryptor, add in self._ciphers:
            encryptor.update_into(self._zeros[: WORD_BYTES * len(words)], scratch.data.cast("B"))
            add(words, scratch, out=words)


def add_streams(words: Words, streams: Sequence[Stream], start: int) -> None:
    """Add masks to ``words`` in place, modulo 2^32; ``words[0]`` is value ``start`` of the vector."""
    masks = Masks(streams, start)
    for piece in chunks(len(words), CHUNK_VALUES):
        masks.add_to(words[piece])


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
        masks, beyond = Masks(self._streams, self._start), 0
        for piece in chunks(len(values), CHUNK_VALUES):
            beyond += self._grid.to_words(values[piece], self._share, words[piece])
            masks.add_to(words[piece])
        self.clipped.add(beyond)
