"""``fp32``, ``fp16`` and ``bf16``: each value as one little-endian binary number, in order."""

from __future__ import annotations

import sys

import numpy as np
import torch

from p2ptrain.codecs.arrays import (
    CHUNK_VALUES,
    Buffer,
    byte_array,
    check_vector,
    check_weight,
    chunks,
    writable_byte_array,
)  # fmt: skip
from p2ptrain.codecs.base import CodecError
from p2ptrain.codecs.native import NativeCodec

NATIVE_VALUES = 128
"""Values in a block of the native functions: ``DENSE`` of `codecs.c`. The encoded bytes do not depend on it."""
NOT_FINITE = "a value is not finite"


class Fp32Codec(NativeCodec):
    """Four bytes per value; decoding restores the input bit for bit, signed zeros and subnormals included."""

    name = "fp32"
    version = 1
    native_values = NATIVE_VALUES
    refusal = NOT_FINITE

    def encoded_bytes(self, num_values: int) -> int:
        return 4 * num_values

    def encode_into(self, vector: torch.Tensor, out: bytearray | memoryview) -> None:
        tensor = check_vector(vector)
        array = writable_byte_array(out, self.encoded_bytes(len(tensor)), self.name)
        done = self._run_native("encode", tensor.data_ptr(), array.ctypes.data, len(tensor))
        values, target = tensor.numpy()[done:], array.view("<f4")[done:]
        for piece in chunks(len(values), CHUNK_VALUES):
            if not bool(np.isfinite(values[piece]).all()):
                raise CodecError(f"fp32: {NOT_FINITE}")
            target[piece] = values[piece]

    def encoded_view(self, vector: torch.Tensor) -> memoryview | None:
        return check_vector(vector).numpy().data.cast("B") if sys.byteorder == "little" else None

    def largest(self, data: Buffer, num_values: int) -> float:
        """Avoids a copy if ``data`` is writable and aligned."""
        array = byte_array(data, self.encoded_bytes(num_values), self.name).view("<f4")
        if not (num_values and array.flags.writeable and array.flags.aligned and sys.byteorder == "little"):
            return super().largest(data, num_values)
        least, greatest = (float(extreme) for extreme in torch.from_numpy(array).aminmax())  # hands on NaN
        return max(-least, greatest)

    def decode_into(self, data: Buffer, out: torch.Tensor) -> None:
        values = check_vector(out).numpy()
        np.copyto(values, byte_array(data, self.encoded_bytes(len(values)), self.name).view("<f4"))

    def accumulate_into(self, data: Buffer, weight: float, out: torch.Tensor) -> None:
        """Rounds once for the product and once for the sum."""
        values = check_vector(out)
        rounded_weight = check_weight(weight)
        array = byte_array(data, self.encoded_bytes(len(values)), self.name)
        done = self._run_native("accumulate", array.ctypes.data, values.data_ptr(), len(values), rounded_weight)
        values, source = values[done:], array.view("<f4")[done:]
        scratch = torch.empty(min(len(values), CHUNK_VALUES), dtype=torch.float32)
        for piece in chunks(len(values), CHUNK_VALUES):
            terms = scratch[: piece.stop - piece.start]
            np.copyto(terms.numpy(), source[piece])
            # Two instructions on purpose: add(alpha=) may be compiled to a fused multiply-add on some CPUs only.
            terms.mul_(rounded_weight)
            values[piece].add_(terms)

    def validate(self, data: Buffer, num_values: int) -> None:
        array = byte_array(data, self.encoded_bytes(num_values), self.name)
        done = self._run_native("validate", array.ctypes.data, 0, num_values)
        source = array.view("<f4")[done:]
        for piece in chunks(len(source), CHUNK_VALUES):
            if not bool(np.isfinite(source[piece]).all()):
                raise CodecError(f"fp32: {NOT_FINITE}")


class _SixteenBitCodec(NativeCodec):
    """Two bytes per value, rounded to the nearest number of a 16-bit format, ties to even.

    Attributes:
        limit: The smallest magnitude that rounds to infinity; it and larger ones are refused.
        exponent: Mask of the exponent bits; all are set in numbers that are not finite.
    """

    dtype: torch.dtype
    limit: float
    exponent: int
    native_values = NATIVE_VALUES
    lossy = True

    def encoded_bytes(self, num_values: int) -> int:
        return 2 * num_values

    def encode_into(self, vector: torch.Tensor, out: bytearray | memoryview) -> None:
        values = check_vector(vector)
        array = writable_byte_array(out, self.encoded_bytes(len(values)), self.name)
        done = self._run_native("encode", values.data_ptr(), array.ctypes.data, len(values))
        values, target = values[done:], array.view("<i2")[done:]
        scratch = torch.empty(min(len(values), CHUNK_VALUES), dtype=self.dtype)
        bits = scratch.view(torch.int16).numpy()  # NumPy has no bfloat16.
        magnitudes = torch.empty(len(scratch), dtype=torch.float32)
        for piece in chunks(len(values), CHUNK_VALUES):
            length = piece.stop - piece.start
            torch.abs(values[piece], out=magnitudes[:length])
            # NaN, which amax hands on, fails this comparison too.
            if not float(magnitudes[:length].amax()) < self.limit:
                raise CodecError(f"{self.name}: {self.refusal}")
            scratch[:length].copy_(values[piece])
            target[piece] = bits[:length]

    def decode_into(self, data: Buffer, out: torch.Tensor) -> None:
        values = check_vector(out)
        array = byte_array(data, self.encoded_bytes(len(values)), self.name)
        done = self._run_native("decode", array.ctypes.data, values.data_ptr(), len(values))
        values, source = values[done:], array.view("<i2")[done:]
        scratch = torch.empty(min(len(values), CHUNK_VALUES), dtype=self.dtype)
        bits = scratch.view(torch.int16).numpy()
        for piece in chunks(len(values), CHUNK_VALUES):
            # torch's conversion is vectorised, but needs a copy of the possibly read-only ``data``.
            length = piece.stop - piece.start
            np.copyto(bits[:length], source[piece])
            values[piece].copy_(scratch[:length])

    def accumulate_into(self, data: Buffer, weight: float, out: torch.Tensor) -> None:
        """Rounds once for the product and once for the sum."""
        values = check_vector(out)
        rounded_weight = check_weight(weight)
        array = byte_array(data, self.encoded_bytes(len(values)), self.name)
        done = self._run_native("accumulate", array.ctypes.data, values.data_ptr(), len(values), rounded_weight)
        values, source = values[done:], array.view("<i2")[done:]
        scratch = torch.empty(min(len(values), CHUNK_VALUES), dtype=self.dtype)
        bits = scratch.view(torch.int16).numpy()
        terms = torch.empty(len(scratch), dtype=torch.float32)
        for piece in chunks(len(values), CHUNK_VALUES):
            length = piece.stop - piece.start
            part = terms[:length]
            np.copyto(bits[:length], source[piece])
            part.copy_(scratch[:length])
            # Two instructions on purpose: add(alpha=) may be compiled to a fused multiply-add on some CPUs only.
            part.mul_(rounded_weight)
            values[piece].add_(part)

    def validate(self, data: Buffer, num_values: int) -> None:
        array = byte_array(data, self.encoded_bytes(num_values), self.name)
        done = self._run_native("validate", array.ctypes.data, 0, num_values, refusal=NOT_FINITE)
        bits, exponent = array.view("<u2")[done:], np.uint16(self.exponent)
        for piece in chunks(len(bits), CHUNK_VALUES):
            if bool(((bits[piece] & exponent) == exponent).any()):
                raise CodecError(f"{self.name}: {NOT_FINITE}")


class Fp16Codec(_SixteenBitCodec):
    """IEEE-754 half precision: ``|decoded - x| <= max(|x| * 2**-11, 2**-25)``.

    Magnitudes from 65520 on, half-way between the largest half 65504 and 65536, round to infinity and are refused.
    """

    name = "fp16"
    version = 1
    dtype = torch.float16
    limit = 65520.0
    exponent = 0x7C00
    refusal = "a value is not finite or beyond 65504 in magnitude: use bf16, fp32 or int8"


class Bf16Codec(_SixteenBitCodec):
    """bfloat16, the upper half of fp32: ``|decoded - x| <= max(|x| * 2**-8, 2**-134)``.

    It has the range of fp32 and an eighth of fp16's precision. Values in the last half step of fp32's range would round
    to infinity and are refused.
    """

    name = "bf16"
    version = 1
    dtype = torch.bfloat16
    limit = (2.0 - 2.0**-8) * 2.0**127
    exponent = 0x7F80
    refusal = "a value is not finite or beyond 3.389e38 in magnitude: use fp32"
