"""``int8`` and ``int4``: block-wise quantisation around zero.

The encoding of a block of consecutive values (256 in int8, 128 in int4) is its scale, little-endian fp32, and its
codes::

    | scale of block 0 | codes of block 0 | scale 1 | codes of block 1 | ... | scale | codes of the last block |

    peak  = max(|x|) over the block            scale = max(peak, 2**-100) / levels, or 0 if peak = 0
    q     = round_half_even(x * (levels / max(peak, 2**-100)))                  decoded = q * scale

with 127 levels for ``int8`` and 7 for ``int4``. The error is half a quantisation step; the last factor covers the fp32
roundings of scale and product::

    |decoded - x| <= max(peak, 2**-100) / (2 * levels) * (1 + 2**-14)

256 is the largest power of two that keeps the twice-encoded int8 mean of four Gaussian vectors within 1 % relative L2
error.

Only single IEEE-754 operations (maximum, divide, multiply, add, round to nearest even) touch the values, never a fused
multiply-add, so every CPU computes the same bits, natively or not. The floor of ``2**-100`` keeps scales out of
the subnormal range, where CPUs differ in speed and, by mode bits, in results.

Block-wise absmax quantisation: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", section 2.1,
https://arxiv.org/abs/2110.02861 (there with a non-linear code; here linear, which is faster to decode).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from p2ptrain.buffers import Buffer
from p2ptrain.codecs.base import CHUNK_VALUES, Bytes, CodecError, NativeCodec, chunks

SCALE_BYTES: Final = 4
MIN_PEAK: Final = 2.0**-100
MAX_PEAK: Final = 2.0**120
"""Larger values are refused, so that every valid encoding decodes to finite numbers."""
BIAS: Final = 8
"""Added to a quantised value for an unsigned four-bit code."""

Codes = npt.NDArray[np.int8 | np.uint8]
Scales = npt.NDArray[np.float32]
"""Scales of the blocks, ``[rows, 1]``: a view into encoded bytes, possibly unaligned."""


class BlockwiseCodec(NativeCodec):
    """Base of both widths; subclasses turn quantised values into bytes.

    Attributes:
        levels: The largest quantised value.
        code_type: Type of one code, or of a byte with two codes.
    """

    levels: float
    code_type: type[np.int8] | type[np.uint8]
    lossy = True
    refusal = "a value is not finite or beyond 2**120 in magnitude"

    @abstractmethod
    def code_bytes(self, num_values: int) -> int:
        """Return the size of the codes of ``num_values`` values in one block."""

    @abstractmethod
    def write_codes(self, rounded: torch.Tensor, out: torch.Tensor) -> None:
        """Write whole numbers within ``levels`` (fp32 ``[rows, columns]``) to ``[rows, code_bytes(columns)]``."""

    @abstractmethod
    def read_codes(self, codes: Codes, out: npt.NDArray[np.float32]) -> None:
        """Invert `write_codes`, overwriting ``out``."""

    def check_codes(self, codes: Codes, columns: int) -> None:
        """Raise `CodecError` for bytes that no encoder writes and no decoder notices."""

    def encoded_bytes(self, num_values: int) -> int:
        blocks, rest = divmod(num_values, self.block_size)
        size = blocks * (SCALE_BYTES + self.code_bytes(self.block_size))
        return size + (SCALE_BYTES + self.code_bytes(rest) if rest else 0)

    def _encode(self, values: torch.Tensor, encoded: Bytes, done: int) -> None:
        for start, rows, columns in self._spans(done, len(values)):
            span = values[start : start + rows * columns].view(rows, columns)
            scales, codes = self._views(encoded, start, rows, columns)
            self._encode_rows(span, torch.from_numpy(codes), scales)

    def _encode_rows(self, span: torch.Tensor, codes: torch.Tensor, scales: Scales) -> None:
        """Encode fp32 ``span`` [rows, columns] into ``codes`` [rows, code_bytes] and ``scales``."""
        rows, columns = span.shape
        peaks = torch.empty(rows, 1, dtype=torch.float32)
        scratch = torch.empty(min(rows, self._rows_per_chunk), columns, dtype=torch.float32)
        levels, floor = torch.tensor(self.levels), torch.tensor(MIN_PEAK, dtype=torch.float32)
        for piece in chunks(rows, self._rows_per_chunk):
            source, work, peak = span[piece], scratch[: piece.stop - piece.start], peaks[piece]
            torch.abs(source, out=work)
            torch.amax(work, 1, keepdim=True, out=peak)
            inverse = torch.maximum(peak, floor)
            torch.div(levels, inverse, out=inverse)
            torch.mul(source, inverse, out=work)
            work.round_()
            self.write_codes(work, codes[piece])
        # amax hands on NaN, and NaN fails the comparison. The error discards its codes.
        if not bool((peaks <= MAX_PEAK).all()):
            raise CodecError(f"{self.name}: {self.refusal}")
        scale = torch.where(peaks == 0, 0.0, torch.maximum(peaks, floor).div_(levels))
        scales[...] = scale.numpy()

    def _decode(self, encoded: Bytes, values: torch.Tensor, done: int) -> None:
        for start, rows, columns in self._spans(done, len(values)):
            scales, codes = self._views(encoded, start, rows, columns)
            factors = torch.from_numpy(scales.astype(np.float32))
            span = values[start : start + rows * columns].view(rows, columns)
            for piece in chunks(rows, self._rows_per_chunk):
                self._decode_rows(codes[piece], factors[piece], span[piece])

    def _accumulate(self, encoded: Bytes, weight: float, values: torch.Tensor, done: int) -> None:
        """Add ``q * (scale * weight)``.

        The weight multiplies the scale, not each value. For weights other than 1 the last bit may differ from
        ``weight`` times the decoded value.
        """
        scratch = torch.empty(min(len(values) - done, CHUNK_VALUES), dtype=torch.float32)
        for start, rows, columns in self._spans(done, len(values)):
            scales, codes = self._views(encoded, start, rows, columns)
            factors = torch.from_numpy(scales.astype(np.float32)).mul_(weight)
            span = values[start : start + rows * columns].view(rows, columns)
            for piece in chunks(rows, self._rows_per_chunk):
                terms = scratch[: (piece.stop - piece.start) * columns].view(-1, columns)
                self._decode_rows(codes[piece], factors[piece], terms)
                span[piece].add_(terms)

    def _decode_rows(self, codes: Codes, factors: torch.Tensor, out: torch.Tensor) -> None:
        self.read_codes(codes, out.numpy())
        # A separate instruction on purpose: addcmul may become a fused multiply-add on some CPUs.
        out.mul_(factors)

    def validate(self, data: Buffer, num_values: int) -> None:
        """Check length and scales. The lowest code is valid although no encoder writes it."""
        array = self._array(data, num_values)
        max_scale = float(np.float32(MAX_PEAK) / np.float32(self.levels))
        for start, rows, columns in self._spans(0, num_values):
            scales, codes = self._views(array, start, rows, columns)
            for piece in chunks(rows, CHUNK_VALUES):
                # NaN fails too; -0.0 passes and decodes to zeros.
                if not bool(np.all((scales[piece] >= 0) & (scales[piece] <= max_scale))):
                    raise CodecError(
                        f"{self.name}: a block's scale is negative, not finite or beyond 2**120 / {self.levels:g}"
                    )
            self.check_codes(codes, columns)

    def largest(self, data: Buffer, num_values: int) -> float:
        """Return the largest scale times ``levels``; the lowest code, which no encoder writes, exceeds it slightly."""
        array = self._array(data, num_values)
        scales = [self._views(array, *span)[0].max() for span in self._spans(0, num_values)]
        return float(np.max(scales)) * self.levels if scales else 0.0

    def squared_norms(self, data: Buffer, num_values: int, step: int) -> list[float]:
        """Sum the squared scale times the sum of squared codes of each block, without decoding.

        The sum of squared codes is a whole number below ``2**24``, which fp32 holds exactly in any order of addition.
        """
        array = self._array(data, num_values)
        steps, blocks = -(-num_values // step), step // self.block_size
        squares, energies = np.zeros(steps * blocks, np.int32), np.zeros(steps * blocks)
        done = self._run_native("squares", array.ctypes.data, squares.ctypes.data, num_values)
        scratch = np.empty((self._rows_per_chunk, self.block_size), np.float32)
        for start, rows, columns in self._spans(done, num_values):
            _, codes = self._views(array, start, rows, columns)
            for piece in chunks(rows, self._rows_per_chunk):
                numbers = scratch[: piece.stop - piece.start, :columns]
                self.read_codes(codes[piece], numbers)
                first = start // self.block_size + piece.start
                squares[first : first + len(numbers)] = np.matmul(numbers[:, None, :], numbers[:, :, None])[:, 0, 0]
        for start, rows, columns in self._spans(0, num_values):
            scales, first = self._views(array, start, rows, columns)[0][:, 0], start // self.block_size
            energies[first : first + rows] = np.square(scales.astype(np.float64)) * squares[first : first + rows]
        sums = energies.reshape(steps, blocks)
        while (width := sums.shape[1]) > 1:  # By halves, so that the order is independent of libraries.
            half = -(-width // 2)
            sums[:, : width - half] += sums[:, half:]
            sums = sums[:, :half]
        found: list[float] = sums[:, 0].tolist()
        return found

    @property
    def _rows_per_chunk(self) -> int:
        return CHUNK_VALUES // self.block_size

    def _views(self, array: npt.NDArray[np.uint8], start: int, rows: int, columns: int) -> tuple[Scales, Codes]:
        """Return views into encoded bytes: scales ``<f4[rows, 1]`` and codes ``[rows, n]``."""
        offset = start // self.block_size * (SCALE_BYTES + self.code_bytes(self.block_size))
        width = SCALE_BYTES + self.code_bytes(columns)
        matrix = array[offset : offset + rows * width].reshape(rows, width)
        return matrix[:, :SCALE_BYTES].view("<f4"), matrix[:, SCALE_BYTES:].view(self.code_type)


class Int8Codec(BlockwiseCodec):
    """One byte per value and one fp32 scale per 256 values; a code is the signed quantised value."""

    name = "int8"
    version = 1
    block_size = native_values = 256
    levels = 127.0
    code_type = np.int8

    def code_bytes(self, num_values: int) -> int:
        return num_values

    def write_codes(self, rounded: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(rounded)

    def read_codes(self, codes: Codes, out: npt.NDArray[np.float32]) -> None:
        np.copyto(out, codes)


class Int4Codec(BlockwiseCodec):
    """Four bits per value and one fp32 scale per 128 values; a code is the quantised value plus 8.

    Byte ``i`` of a block of ``n`` holds value ``i`` in its low half and value ``i + ceil(n / 2)`` in its high half, so
    both halves are in order. The last high half of an odd block is zero.
    """

    name = "int4"
    version = 1
    block_size = native_values = 128
    levels = 7.0
    code_type = np.uint8

    def code_bytes(self, num_values: int) -> int:
        return -(-num_values // 2)

    def write_codes(self, rounded: torch.Tensor, out: torch.Tensor) -> None:
        half, rest = _halves(rounded.shape[1])
        # NaN becomes an arbitrary code here; `_encode_rows` refuses it afterwards.
        codes = rounded.add(BIAS).to(torch.uint8).bitwise_and_(15)
        codes[:, :rest].bitwise_or_(codes[:, half:].bitwise_left_shift(4))
        out.copy_(codes[:, :half])

    def read_codes(self, codes: Codes, out: npt.NDArray[np.float32]) -> None:
        half, rest = _halves(out.shape[1])
        np.copyto(out[:, :half], codes & np.uint8(15))
        np.copyto(out[:, half:], codes[:, :rest] >> np.uint8(4))
        out -= np.float32(BIAS)

    def check_codes(self, codes: Codes, columns: int) -> None:
        """Refuse an odd block whose last high half is not zero, so that equal values have equal bytes."""
        if columns % 2 and bool((codes[:, -1] >> np.uint8(4)).any()):
            raise CodecError(f"{self.name}: the unused half of a block's last byte is not zero")


def _halves(columns: int) -> tuple[int, int]:
    """Return the numbers of 4-bit codes in the low and in the high halves of a block."""
    return -(-columns // 2), columns // 2
