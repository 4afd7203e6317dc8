"""``int8`` and ``int4``: block-wise quantisation around zero, for updates and gradients.

A block's header is its scale, little-endian fp32 (see `p2ptrain.codecs.blockwise` for the layout)::

    peak  = max(|x|) over the block            scale = max(peak, 2**-100) / levels, or 0 if peak = 0
    q     = round_half_even(x * (levels / max(peak, 2**-100)))                  decoded = q * scale

with 127 levels for ``int8`` and 7 for ``int4``. For a block whose largest magnitude is ``peak``::

    |decoded - x| <= max(peak, 2**-100) / (2 * levels) * (1 + 2**-14)

(half a quantisation step; the last factor covers the fp32 roundings of scale and product). A block of zeros has scale 0
and decodes to zeros.
"""

from __future__ import annotations

import numpy as np
import torch

from p2ptrain.codecs.arrays import Buffer, byte_array, chunks
from p2ptrain.codecs.base import CodecError
from p2ptrain.codecs.blockwise import MAX_PEAK, MIN_PEAK, BlockwiseCodec, ByteCodes, HalfByteCodes, Headers


class SymmetricCodec(BlockwiseCodec):
    """What both widths share."""

    header_numbers = 1

    def encode_rows(self, span: torch.Tensor, codes: torch.Tensor, headers: Headers) -> None:
        """See `BlockwiseCodec.encode_rows`."""
        rows, columns = span.shape
        peaks = torch.empty(rows, 1)
        scratch = torch.empty(min(rows, self._rows_per_chunk), columns)
        levels, floor = torch.tensor(self.levels), torch.tensor(MIN_PEAK)
        for piece in chunks(rows, self._rows_per_chunk):
            source, work, peak = span[piece], scratch[: piece.stop - piece.start], peaks[piece]
            torch.abs(source, out=work)
            torch.amax(work, 1, keepdim=True, out=peak)
            inverse = torch.maximum(peak, floor)
            torch.div(levels, inverse, out=inverse)
            torch.mul(source, inverse, out=work)
            work.round_()
            self.write_codes(work, codes[piece])
        # amax hands on NaN, and NaN fails the comparison. What was quantised from such values is thrown away here.
        if not bool((peaks <= MAX_PEAK).all()):
            raise CodecError(f"{self.name}: {self.refusal}")
        scale = torch.where(peaks == 0, torch.zeros(()), torch.maximum(peaks, floor).div_(levels))
        headers[...] = scale.numpy()

    def check_headers(self, headers: Headers) -> None:
        """See `BlockwiseCodec.check_headers`."""
        max_scale = float(np.float32(MAX_PEAK) / np.float32(self.levels))
        # False for NaN too. -0.0 passes: it decodes to zeros.
        if not bool(np.all((headers >= 0) & (headers <= max_scale))):
            raise CodecError(f"{self.name}: a block's scale is negative, not finite or beyond 2**120 / {self.levels:g}")

    def largest(self, data: Buffer, num_values: int) -> float:
        """See `Codec.largest`; from the scales alone, so that it costs next to nothing.

        The lowest code, which no encoder writes, decodes to somewhat more.
        """
        array = byte_array(data, self.encoded_bytes(num_values), self.name)
        scales = [self._views(array, *span)[0].max() for span in self._spans(0, num_values)]
        return float(np.max(scales)) * self.levels if scales else 0.0

    def squared_norms(self, data: Buffer, num_values: int, step: int) -> list[float]:
        """See `Codec.squared_norms`; without decoding: for each block, its scale's square times the sum of the codes'.

        That sum is a whole number below ``2**24``, so that fp32 holds it exactly in whatever order it is added up.
        """
        array = byte_array(data, self.encoded_bytes(num_values), self.name)
        steps, blocks = -(-num_values // step), step // self.block_size
        squares, energies = np.zeros(steps * blocks, np.int32), np.zeros(steps * blocks)
        done = self._run_kernel("squares", array.ctypes.data, squares.ctypes.data, num_values)
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
        while (width := sums.shape[1]) > 1:  # By halves, so that the order does not depend on a library.
            half = -(-width // 2)
            sums[:, : width - half] += sums[:, half:]
            sums = sums[:, :half]
        found: list[float] = sums[:, 0].tolist()
        return found


class Int8Codec(ByteCodes, SymmetricCodec):
    """One byte a value, with one fp32 scale for each 256 values; a code is the quantised value, signed."""

    name = "int8"
    version = 1
    levels = 127.0
    code_type = np.int8


class Int4Codec(HalfByteCodes, SymmetricCodec):
    """Four bits a value, with one fp32 scale for each 128 values; a code is the quantised value plus 8."""

    name = "int4"
    version = 1
    levels = 7.0
    bias = 8.0
