"""``fp32``, ``fp16`` and ``bf16``: each value as one little-endian binary number, in order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from p2ptrain.buffers import Buffer
from p2ptrain.codecs.base import CHUNK_VALUES, NOT_FINITE, Bytes, CodecError, NativeCodec, check_vector, chunks

Words = npt.NDArray[np.unsignedinteger[Any]]


class DenseCodec(NativeCodec):
    """Each value rounded to the nearest number of a binary format, ties to even.

    Attributes:
        word: The NumPy type of a value's bits.
        limit: The smallest magnitude that rounds to infinity; it and larger ones are refused.
        exponent: Mask of the exponent bits; all are set in numbers that are not finite.
    """

    dtype: torch.dtype
    word: str
    limit: float
    exponent: int
    native_values = 128
    """``DENSE`` of `codecs.c`. The encoded bytes do not depend on it."""

    def encoded_bytes(self, num_values: int) -> int:
        return self.dtype.itemsize * num_values

    def _encode(self, values: torch.Tensor, encoded: Bytes, done: int) -> None:
        values, target = values[done:], encoded.view(f"<{self.word}")[done:]
        numbers, bits = self._scratch(len(values))
        magnitudes = torch.empty(len(numbers), dtype=torch.float32)
        for piece in chunks(len(values), CHUNK_VALUES):
            length = piece.stop - piece.start
            torch.abs(values[piece], out=magnitudes[:length])
            # NaN, which amax hands on, fails this comparison too.
            if not float(magnitudes[:length].amax()) < self.limit:
                raise CodecError(f"{self.name}: {self.refusal}")
            numbers[:length].copy_(values[piece])
            target[piece] = bits[:length]

    def _decode(self, encoded: Bytes, values: torch.Tensor, done: int) -> None:
        values, source = values[done:], encoded.view(f"<{self.word}")[done:]
        numbers, bits = self._scratch(len(values))
        for piece in chunks(len(values), CHUNK_VALUES):
            # torch's conversion is vectorised, but needs a copy of the possibly read-only bytes.
            length = piece.stop - piece.start
            np.copyto(bits[:length], source[piece])
            values[piece].copy_(numbers[:length])

    def _accumulate(self, encoded: Bytes, weight: float, values: torch.Tensor, done: int) -> None:
        """Rounds once for the product and once for the sum."""
        values, source = values[done:], encoded.view(f"<{self.word}")[done:]
        numbers, bits = self._scratch(len(values))
        terms = torch.empty(len(numbers), dtype=torch.float32)
        for piece in chunks(len(values), CHUNK_VALUES):
            length = piece.stop - piece.start
            np.copyto(bits[:length], source[piece])
            terms[:length].copy_(numbers[:length])
            # Two instructions on purpose: add(alpha=) may be compiled to a fused multiply-add on some CPUs only.
            values[piece].add_(terms[:length].mul_(weight))

    def validate(self, data: Buffer, num_values: int) -> None:
        array = self._array(data, num_values)
        done = self._run_native("validate", array.ctypes.data, 0, num_values)
        bits = array.view(f"<{self.word}")[done:]
        exponent = bits.dtype.type(self.exponent)
        for piece in chunks(len(bits), CHUNK_VALUES):
            if bool(((bits[piece] & exponent) == exponent).any()):
                raise CodecError(f"{self.name}: {NOT_FINITE}")

    def _scratch(self, num_values: int) -> tuple[torch.Tensor, Words]:
        """Return numbers for one chunk at most, and a view of their bits, because NumPy has no bfloat16."""
        numbers = torch.empty(min(num_values, CHUNK_VALUES), dtype=self.dtype)
        return numbers, numbers.view(torch.uint8).numpy().view(self.word)


class Fp32Codec(DenseCodec):
    """Four bytes per value; decoding restores the input bit for bit, signed zeros and subnormals included."""

    name = "fp32"
    version = 1
    dtype = torch.float32
    word = "u4"
    limit = float("inf")
    exponent = 0x7F800000
    refusal = NOT_FINITE

    def encoded_view(self, vector: torch.Tensor) -> memoryview | None:
        return check_vector(vector).numpy().data.cast("B") if sys.byteorder == "little" else None

    def decode_into(self, data: Buffer, out: torch.Tensor) -> None:
        values = check_vector(out).numpy()
        np.copyto(values, self._array(data, len(values)).view("<f4"))

    def _accumulate(self, encoded: Bytes, weight: float, values: torch.Tensor, done: int) -> None:
        """As `DenseCodec`, with one copy less."""
        values, source = values[done:], encoded.view("<f4")[done:]
        for piece in chunks(len(values), CHUNK_VALUES):
            values[piece].add_(torch.from_numpy(source[piece].astype(np.float32)).mul_(weight))

    def largest(self, data: Buffer, num_values: int) -> float:
        if (values := self._values(data, num_values)) is None:
            return super().largest(data, num_values)
        least, greatest = (float(extreme) for extreme in values.aminmax())  # hands on NaN
        return max(-least, greatest)

    def _pieces(self, data: Buffer, num_values: int) -> Iterator[torch.Tensor]:
        values = self._values(data, num_values)
        if values is None:
            return super()._pieces(data, num_values)
        return (values[piece] for piece in chunks(num_values, CHUNK_VALUES))

    def _values(self, data: Buffer, num_values: int) -> torch.Tensor | None:
        """Return the values in place; None if ``data`` is empty, or not writable and aligned."""
        array = self._array(data, num_values).view("<f4")
        fits = num_values and array.flags.writeable and array.flags.aligned and sys.byteorder == "little"
        return torch.from_numpy(array) if fits else None


class Fp16Codec(DenseCodec):
    """IEEE-754 half precision: ``|decoded - x| <= max(|x| * 2**-11, 2**-25)``.

    Magnitudes from 65520 on, half-way between the largest half 65504 and 65536, round to infinity and are refused.
    """

    name = "fp16"
    version = 1
    lossy = True
    dtype = torch.float16
    word = "u2"
    limit = 65520.0
    exponent = 0x7C00
    refusal = "a value is not finite or beyond 65504 in magnitude: use bf16, fp32 or int8"


class Bf16Codec(DenseCodec):
    """bfloat16, the upper half of fp32: ``|decoded - x| <= max(|x| * 2**-8, 2**-134)``.

    It has the range of fp32 and an eighth of fp16's precision. Values in the last half step of fp32's range would round
    to infinity and are refused.
    """

    name = "bf16"
    version = 1
    lossy = True
    dtype = torch.bfloat16
    word = "u2"
    limit = (2.0 - 2.0**-8) * 2.0**127
    exponent = 0x7F80
    refusal = "a value is not finite or beyond 3.389e38 in magnitude: use fp32"
