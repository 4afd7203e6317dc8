"""A codec of 8-bit floating-point values."""

from __future__ import annotations

import numpy as np
import torch

from p2ptrain.buffers import Buffer
from p2ptrain.codecs import Codec, CodecError
from p2ptrain.codecs.base import byte_array, check_vector, check_weight, writable_byte_array

BLOCK = 256
ROW = BLOCK + 1
"""Bytes of a block: its exponent, then one byte a value."""
MAX_EXPONENT = 100
ONE = 0x3C
"""The largest byte but for its sign: 1.0."""


class Float8(Codec):
    """Five bits of exponent and two of mantissa (e5m2), over a power of two for each 256 values.

    A shorter last block is padded with zeros.
    """

    name = "float8"
    version = 1
    block_size = BLOCK
    lossy = True

    def encoded_bytes(self, num_values: int) -> int:
        """See `Codec`."""
        return ROW * -(-num_values // BLOCK)

    def encode_into(self, vector: torch.Tensor, out: bytearray | memoryview) -> None:
        """See `Codec`."""
        values = check_vector(vector).numpy()
        rows = writable_byte_array(out, self.encoded_bytes(len(values)), self.name).reshape(-1, ROW)
        if not (np.isfinite(values).all() and np.abs(values).max(initial=0) < 2.0**MAX_EXPONENT):
            raise CodecError(f"float8: a value is not finite or beyond 2**{MAX_EXPONENT}")
        blocks = np.zeros((len(rows), BLOCK), np.float32)
        blocks.reshape(-1)[: len(values)] = values
        exponents = np.frexp(np.abs(blocks).max(axis=1))[1].clip(-MAX_EXPONENT, MAX_EXPONENT)
        halves = np.ldexp(blocks, -exponents[:, None]).astype("<f2").view("<u2").astype(np.uint32)
        rows[:, 0] = exponents.astype(np.int8).view(np.uint8)
        rows[:, 1:] = (halves + 0x7F + ((halves >> 8) & 1)) >> 8  # To the nearest, ties to even.

    def _decoded(self, data: Buffer, num_values: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        rows = byte_array(data, self.encoded_bytes(num_values), self.name).reshape(-1, ROW)
        values = (rows[:, 1:].astype("<u2") << 8).view("<f2").astype(np.float32)
        exponents = rows[:, 0].copy().view(np.int8).astype(np.int32)
        with np.errstate(all="ignore"):  # Bytes that `validate` refuses may be decoded, to any values.
            return np.ldexp(values, exponents[:, None]).reshape(-1)[:num_values]

    def decode_into(self, data: Buffer, out: torch.Tensor) -> None:
        """See `Codec`."""
        values = check_vector(out).numpy()
        values[:] = self._decoded(data, len(values))

    def accumulate_into(self, data: Buffer, weight: float, out: torch.Tensor) -> None:
        """See `Codec`."""
        values = check_vector(out).numpy()
        terms = self._decoded(data, len(values)) * np.float32(check_weight(weight))
        values += terms  # Rounded by itself: a fused multiply-add gives other bits on some CPUs.

    def validate(self, data: Buffer, num_values: int) -> None:
        """See `Codec`."""
        rows = byte_array(data, self.encoded_bytes(num_values), self.name).reshape(-1, ROW)
        exponents = np.abs(rows[:, 0].copy().view(np.int8).astype(np.int32))
        if exponents.max(initial=0) > MAX_EXPONENT or (rows[:, 1:] & 0x7F).max(initial=0) > ONE:
            raise CodecError("float8: an exponent or a value is too large")
