"""Block-wise quantisation: what the codecs `p2ptrain.codecs.symmetric` and `p2ptrain.codecs.affine` share.

A block of consecutive values (256 in 8 bits, 128 in 4) is sent as one or two fp32 numbers and its quantised values::

    | header of block 0 | codes of block 0 | header 1 | codes of block 1 | ... | header | codes of the last block |

The header stands next to its block, so a vector can be cut at any multiple of a block and encoded, sent and decoded in
pieces. 256 is the largest power of two for which the mean of four Gaussian vectors, each encoded in ``int8`` and the
mean encoded again, stays within 1 % relative L2 error (0.98 %; 512 values: 1.05 %); it costs 1.6 % more bytes than bare
int8. A Gaussian vector in ``int4`` has 11.7 % error with blocks of 128, which cost 6 % more bytes than bare int4 (64
values: 10.8 % for 12.5 % more).

Only single IEEE-754 operations (maximum, minimum, divide, multiply, add, subtract, round to nearest even) touch the
values, never a fused multiply-add, so every CPU computes the same bits, with kernels or without. The floor of
``2**-100`` keeps scales out of the subnormal range, where CPUs differ in speed and, by mode bits, in results.

Block-wise absmax quantisation: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", section 2.1,
https://arxiv.org/abs/2110.02861 (there with a non-linear code; here linear, which is faster to decode).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

import numpy as np
import numpy.typing as npt
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
from p2ptrain.codecs.native import KernelCodec

NUMBER_BYTES: Final = 4
MIN_PEAK: Final = 2.0**-100
MAX_PEAK: Final = 2.0**120
"""Larger values are refused: what a hostile sender may ask a decoder to compute must be finite."""

Codes = npt.NDArray[np.int8 | np.uint8]
Headers = npt.NDArray[np.float32]
"""Numbers of the blocks' headers, ``[rows, header_numbers]``: views into encoded bytes, maybe unaligned."""


class BlockwiseCodec(KernelCodec):
    """What all of them share. Subclasses say how headers are found, and how quantised values become bytes.

    Decoding computes ``q * scale``, and adds the header's second number where it has one.

    Attributes:
        levels: The largest quantised value.
        code_type: The type of one code, or of a byte that holds two.
        header_numbers: 1: a scale. 2: a scale, and what is added.
    """

    levels: float
    code_type: type[np.int8] | type[np.uint8]
    header_numbers: int
    lossy = True
    refusal = "a value is not finite or beyond 2**120 in magnitude"

    @property
    def kernel_values(self) -> int:  # type: ignore[override]
        """Kernels work on the codec's own blocks."""
        return self.block_size

    @abstractmethod
    def code_bytes(self, num_values: int) -> int:
        """Bytes that the quantised values of one block take."""

    @abstractmethod
    def write_codes(self, rounded: torch.Tensor, out: torch.Tensor) -> None:
        """Write whole numbers within ``levels`` (fp32 ``[rows, columns]``) to ``[rows, code_bytes(columns)]``."""

    @abstractmethod
    def read_codes(self, codes: Codes, out: npt.NDArray[np.float32]) -> None:
        """The reverse of `write_codes`, overwriting ``out``."""

    def check_codes(self, codes: Codes, columns: int) -> None:
        """Raise `CodecError` for bytes that no encoder writes and that a decoder would not notice."""

    @abstractmethod
    def encode_rows(self, span: torch.Tensor, codes: torch.Tensor, headers: Headers) -> None:
        """Encode fp32 ``span`` [rows, columns] into ``codes`` [rows, code_bytes] and ``headers``.

        Raises:
            CodecError: `refusal`.
        """

    @abstractmethod
    def check_headers(self, headers: Headers) -> None:
        """Raise `CodecError` unless every code decodes to a finite number with these."""

    def encoded_bytes(self, num_values: int) -> int:
        """The codes, and a header for each started block."""
        blocks, rest = divmod(num_values, self.block_size)
        size = blocks * (self._header_bytes + self.code_bytes(self.block_size))
        return size + (self._header_bytes + self.code_bytes(rest) if rest else 0)

    def encode_into(self, vector: torch.Tensor, out: bytearray | memoryview) -> None:
        """See `Codec.encode_into`; refuses values that are not finite or beyond ``2**120``."""
        values = check_vector(vector)
        encoded = writable_byte_array(out, self.encoded_bytes(len(values)), self.name)
        done = self._run_kernel("encode", values.data_ptr(), encoded.ctypes.data, len(values))
        for start, rows, columns in self._spans(done, len(values)):
            span = values[start : start + rows * columns].view(rows, columns)
            headers, codes = self._views(encoded, start, rows, columns)
            self.encode_rows(span, torch.from_numpy(codes), headers)

    def decode_into(self, data: Buffer, out: torch.Tensor) -> None:
        """See `Codec.decode_into`."""
        values = check_vector(out)
        array = byte_array(data, self.encoded_bytes(len(values)), self.name)
        done = self._run_kernel("decode", array.ctypes.data, values.data_ptr(), len(values))
        for start, rows, columns in self._spans(done, len(values)):
            headers, codes = self._views(array, start, rows, columns)
            numbers = torch.from_numpy(headers.astype(np.float32))
            span = values[start : start + rows * columns].view(rows, columns)
            for piece in chunks(rows, self._rows_per_chunk):
                self._decode_rows(codes[piece], numbers[piece], span[piece])

    def accumulate_into(self, data: Buffer, weight: float, out: torch.Tensor) -> None:
        """Add ``q * (scale * weight)``; see `Codec.accumulate_into`.

        The weight multiplies each number of a header, not each value, so that the result can differ from ``weight``
        times the decoded value in the last bit; with weight 1 it does not.
        """
        values = check_vector(out)
        rounded_weight = check_weight(weight)
        array = byte_array(data, self.encoded_bytes(len(values)), self.name)
        done = self._run_kernel("accumulate", array.ctypes.data, values.data_ptr(), len(values), rounded_weight)
        scratch = torch.empty(min(len(values) - done, CHUNK_VALUES), dtype=torch.float32)
        for start, rows, columns in self._spans(done, len(values)):
            headers, codes = self._views(array, start, rows, columns)
            numbers = torch.from_numpy(headers.astype(np.float32)).mul_(rounded_weight)
            span = values[start : start + rows * columns].view(rows, columns)
            for piece in chunks(rows, self._rows_per_chunk):
                terms = scratch[: (piece.stop - piece.start) * columns].view(-1, columns)
                self._decode_rows(codes[piece], numbers[piece], terms)
                span[piece].add_(terms)

    def _decode_rows(self, codes: Codes, numbers: torch.Tensor, out: torch.Tensor) -> None:
        """Overwrite ``out`` [rows, columns] with what the codes mean under ``numbers`` [rows, header_numbers]."""
        self.read_codes(codes, out.numpy())
        # Two instructions on purpose: addcmul could be compiled to a fused multiply-add on some CPUs only.
        out.mul_(numbers[:, :1])
        if self.header_numbers == 2:
            out.add_(numbers[:, 1:])

    def validate(self, data: Buffer, num_values: int) -> None:
        """Check length and headers. The lowest code is valid although no symmetric encoder writes it."""
        array = byte_array(data, self.encoded_bytes(num_values), self.name)
        for start, rows, columns in self._spans(0, num_values):
            headers, codes = self._views(array, start, rows, columns)
            for piece in chunks(rows, CHUNK_VALUES):
                self.check_headers(headers[piece])
            self.check_codes(codes, columns)

    @property
    def _header_bytes(self) -> int:
        return NUMBER_BYTES * self.header_numbers

    @property
    def _rows_per_chunk(self) -> int:
        return CHUNK_VALUES // self.block_size

    def _spans(self, done: int, num_values: int) -> list[tuple[int, int, int]]:
        """(first value, rows, columns) of the matrix of whole blocks and of the shorter last block, if there are.

        Nothing for the first ``done`` values, which are whole blocks.
        """
        rows, rest = divmod(num_values - done, self.block_size)
        spans = [(done, rows, self.block_size)] if rows else []
        return [*spans, (num_values - rest, 1, rest)] if rest else spans

    def _views(self, array: npt.NDArray[np.uint8], start: int, rows: int, columns: int) -> tuple[Headers, Codes]:
        """Strided views into encoded bytes: headers ``<f4[rows, header_numbers]`` and codes ``[rows, n]``."""
        offset = start // self.block_size * (self._header_bytes + self.code_bytes(self.block_size))
        width = self._header_bytes + self.code_bytes(columns)
        matrix = array[offset : offset + rows * width].reshape(rows, width)
        return matrix[:, : self._header_bytes].view("<f4"), matrix[:, self._header_bytes :].view(self.code_type)


class ByteCodes(BlockwiseCodec):
    """Eight bits a value, in blocks of 256."""

    block_size = 256

    def code_bytes(self, num_values: int) -> int:
        """One byte a value."""
        return num_values

    def write_codes(self, rounded: torch.Tensor, out: torch.Tensor) -> None:
        """As signed or unsigned bytes, as `code_type` says."""
        out.copy_(rounded)

    def read_codes(self, codes: Codes, out: npt.NDArray[np.float32]) -> None:
        """See `BlockwiseCodec.read_codes`."""
        np.copyto(out, codes)


class HalfByteCodes(BlockwiseCodec):
    """Four bits a value, in blocks of 128.

    A code is the quantised value plus ``bias``. Byte ``i`` of a block of ``n`` holds value ``i`` in its low half and
    value ``i + ceil(n / 2)`` in its high half, so that both halves are read and written in order; the last high half
    of an odd block is zero.
    """

    block_size = 128
    code_type = np.uint8
    bias: float

    def code_bytes(self, num_values: int) -> int:
        """Half a byte a value."""
        return -(-num_values // 2)

    def write_codes(self, rounded: torch.Tensor, out: torch.Tensor) -> None:
        """Two to a byte."""
        half, rest = _halves(rounded.shape[1])
        # NaN becomes some number here; `encode_rows` refuses it afterwards.
        codes = rounded.add(self.bias).to(torch.uint8).bitwise_and_(15)
        codes[:, :rest].bitwise_or_(codes[:, half:].bitwise_left_shift(4))
        out.copy_(codes[:, :half])

    def read_codes(self, codes: Codes, out: npt.NDArray[np.float32]) -> None:
        """See `BlockwiseCodec.read_codes`."""
        half, rest = _halves(out.shape[1])
        np.copyto(out[:, :half], codes & np.uint8(15))
        np.copyto(out[:, half:], codes[:, :rest] >> np.uint8(4))
        if self.bias:
            out -= np.float32(self.bias)

    def check_codes(self, codes: Codes, columns: int) -> None:
        """Refuse an odd block whose last high half is not zero: equal values have equal bytes."""
        if columns % 2 and bool((codes[:, -1] >> np.uint8(4)).any()):
            raise CodecError(f"{self.name}: the unused half of a block's last byte is not zero")


def _halves(columns: int) -> tuple[int, int]:
    """How many values of a block of 4-bit codes are in low halves, and how many in high ones."""
    return -(-columns // 2), columns // 2
