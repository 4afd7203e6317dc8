"""``fp32``, ``fp16`` and ``bf16``: every value as one little-endian binary number, in order."""

from __future__ import annotations

import numpy as np
import torch

from p2ptrain.codecs.arrays import CHUNK_VALUES, Buffer, byte_array, check_vector, check_weight, chunks
from p2ptrain.codecs.base import Codec, CodecError


class Fp32Codec(Codec):
    """Four bytes a value; decoding gives the input bit for bit, the sign of zero and subnormals included."""

    name = "fp32"
    version = 1

    def encoded_bytes(self, num_values: int) -> int:
        """Four bytes a value."""
        return 4 * num_values

    def encode_into(self, vector: torch.Tensor, out: bytearray | memoryview) -> None:
        """See `Codec.encode_into`; refuses values that are not finite."""
        values = check_vector(vector).numpy()
        target = byte_array(out, self.encoded_bytes(len(values)), self.name).view("<f4")
        for piece in chunks(len(values), CHUNK_VALUES):
            if not bool(np.isfinite(values[piece]).all()):
                raise CodecError("fp32: a value is not finite")
            target[piece] = values[piece]

    def decode_into(self, data: Buffer, out: torch.Tensor) -> None:
        """See `Codec.decode_into`."""
        values = check_vector(out).numpy()
        np.copyto(values, byte_array(data, self.encoded_bytes(len(values)), self.name).view("<f4"))

    def accumulate_into(self, data: Buffer, weight: float, out: torch.Tensor) -> None:
        """See `Codec.accumulate_into`; rounds once for the product and once for the sum."""
        values = check_vector(out)
        rounded_weight = check_weight(weight)
        source = byte_array(data, self.encoded_bytes(len(values)), self.name).view("<f4")
        scratch = torch.empty(min(len(values), CHUNK_VALUES), dtype=torch.float32)
        for piece in chunks(len(values), CHUNK_VALUES):
            terms = scratch[: piece.stop - piece.start]
            np.copyto(terms.numpy(), source[piece])
            # Two instructions on purpose: add(alpha=) may be compiled to a fused multiply-add on some CPUs only.
            terms.mul_(rounded_weight)
            values[piece].add_(terms)

    def validate(self, data: Buffer, num_values: int) -> None:
        """See `Codec.validate`."""
        source = byte_array(data, self.encoded_bytes(num_values), self.name).view("<f4")
        for piece in chunks(num_values, CHUNK_VALUES):
            if not bool(np.isfinite(source[piece]).all()):
                raise CodecError("fp32: a value is not finite")


class _SixteenBitCodec(Codec):
    """Two bytes a value, rounded to the nearest number of a 16-bit format, ties to even.

    Attributes:
        dtype: The format in torch.
        limit: The smallest magnitude that rounds to infinity; it and everything beyond is refused.
        exponent: The bits of the exponent; all of them are set in numbers that are not finite.
        advice: What is said of values that do not fit.
    """

    dtype: torch.dtype
    limit: float
    exponent: int
    advice: str
    lossy = True

    def encoded_bytes(self, num_values: int) -> int:
        """Two bytes a value."""
        return 2 * num_values

    def encode_into(self, vector: torch.Tensor, out: bytearray | memoryview) -> None:
        """See `Codec.encode_into`; refuses values of `limit` or more in magnitude, and those that are not finite."""
        values = check_vector(vector)
        target = byte_array(out, self.encoded_bytes(len(values)), self.name).view("<i2")
        scratch = torch.empty(min(len(values), CHUNK_VALUES), dtype=self.dtype)
        bits = scratch.view(torch.int16).numpy()  # NumPy knows no bfloat16.
        magnitudes = torch.empty(len(scratch), dtype=torch.float32)
        for piece in chunks(len(values), CHUNK_VALUES):
            length = piece.stop - piece.start
            torch.abs(values[piece], out=magnitudes[:length])
            # Written so that NaN, which amax hands on, fails too.
            if not float(magnitudes[:length].amax()) < self.limit:
                raise CodecError(f"{self.name}: a value is not finite or {self.advice}")
            scratch[:length].copy_(values[piece])
            target[piece] = bits[:length]

    def decode_into(self, data: Buffer, out: torch.Tensor) -> None:
        """See `Codec.decode_into`."""
        values = check_vector(out)
        source = byte_array(data, self.encoded_bytes(len(values)), self.name).view("<i2")
        scratch = torch.empty(min(len(values), CHUNK_VALUES), dtype=self.dtype)
        bits = scratch.view(torch.int16).numpy()
        for piece in chunks(len(values), CHUNK_VALUES):
            # Through torch, whose conversion is vectorised; the copy is needed because ``data`` may be read-only.
            length = piece.stop - piece.start
            np.copyto(bits[:length], source[piece])
            values[piece].copy_(scratch[:length])

    def accumulate_into(self, data: Buffer, weight: float, out: torch.Tensor) -> None:
        """See `Codec.accumulate_into`; rounds once for the product and once for the sum."""
        values = check_vector(out)
        rounded_weight = check_weight(weight)
        source = byte_array(data, self.encoded_bytes(len(values)), self.name).view("<i2")
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
        """See `Codec.validate`."""
        bits = byte_array(data, self.encoded_bytes(num_values), self.name).view("<u2")
        exponent = np.uint16(self.exponent)
        for piece in chunks(num_values, CHUNK_VALUES):
            if bool(((bits[piece] & exponent) == exponent).any()):
                raise CodecError(f"{self.name}: a value is not finite")


class Fp16Codec(_SixteenBitCodec):
    """IEEE-754 half precision: ``|decoded - x| <= max(|x| * 2**-11, 2**-25)``.

    Values that would round to infinity (65520 and more in magnitude: half-way between 65504, the largest half, and
    65536) are refused.
    """

    name = "fp16"
    version = 1
    dtype = torch.float16
    limit = 65520.0
    exponent = 0x7C00
    advice = "beyond 65504 in magnitude: use bf16, fp32 or int8"


class Bf16Codec(_SixteenBitCodec):
    """bfloat16, the upper half of fp32: ``|decoded - x| <= max(|x| * 2**-8, 2**-134)``.

    It has the range of fp32 and an eighth of fp16's precision. Values that would round to infinity are refused; only
    the last half step below the end of fp32's range does.
    """

    name = "bf16"
    version = 1
    dtype = torch.bfloat16
    limit = (2.0 - 2.0**-8) * 2.0**127
    exponent = 0x7F80
    advice = "beyond 3.389e38 in magnitude: use fp32"
