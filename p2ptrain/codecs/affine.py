"""``int8a`` and ``int4a``: block-wise quantisation between a block's least and greatest value.

For what is not centred on zero, such as Adam's second moments, of which a code around zero would waste half. A block's
header is its scale and its least value, both little-endian fp32 (see `p2ptrain.codecs.blockwise` for the layout)::

    low   = min(x) over the block, +0 for -0   range = max(x) - low
    scale = max(range, 2**-100) / levels, or 0 if range = 0
    q     = round_half_even((x - low) * (levels / max(range, 2**-100)))         decoded = q * scale + low

with 255 levels for ``int8a`` and 15 for ``int4a``; every operation is rounded to fp32. For a block with this range and
the largest magnitude ``peak``::

    |decoded - x| <= max(range, 2**-100) / (2 * levels) * (1 + 2**-11) + peak * 2**-23

(half a quantisation step with the fp32 roundings of range, difference, factor, scale and product, then that of the last
sum). A block of equal values decodes to exactly these.
"""

from __future__ import annotations

import numpy as np
import torch

from p2ptrain.codecs.arrays import chunks
from p2ptrain.codecs.base import CodecError
from p2ptrain.codecs.blockwise import MAX_PEAK, MIN_PEAK, BlockwiseCodec, ByteCodes, HalfByteCodes, Headers

MAX_DECODED = MAX_PEAK * (1 + 2.0**-20)
"""The largest code of an honest block may decode to a little more than the value it stands for."""


class AffineCodec(BlockwiseCodec):
    """What both widths share."""

    header_numbers = 2

    def encode_rows(self, span: torch.Tensor, codes: torch.Tensor, headers: Headers) -> None:
        """See `BlockwiseCodec.encode_rows`."""
        rows, columns = span.shape
        lows, highs = torch.empty(rows, 1), torch.empty(rows, 1)
        scratch = torch.empty(min(rows, self._rows_per_chunk), columns)
        levels, floor = torch.tensor(self.levels), torch.tensor(MIN_PEAK)
        for piece in chunks(rows, self._rows_per_chunk):
            source, work = span[piece], scratch[: piece.stop - piece.start]
            low, high = lows[piece], highs[piece]
            torch.amin(source, 1, keepdim=True, out=low)
            torch.amax(source, 1, keepdim=True, out=high)
            low.add_(0.0)  # -0 becomes +0: which of the two a minimum is, is not defined.
            inverse = torch.maximum(high - low, floor)
            torch.div(levels, inverse, out=inverse)
            torch.sub(source, low, out=work)
            work.mul_(inverse)
            work.round_()
            self.write_codes(work, codes[piece])
        # amin and amax hand on NaN, and NaN fails the comparison. What was quantised from such values is thrown away.
        if not bool(((lows >= -MAX_PEAK) & (highs <= MAX_PEAK)).all()):
            raise CodecError(f"{self.name}: {self.refusal}")
        ranges = highs.sub_(lows)
        scale = torch.where(ranges == 0, torch.zeros(()), torch.maximum(ranges, floor).div_(levels))
        headers[:, :1] = scale.numpy()
        headers[:, 1:] = lows.numpy()

    def check_headers(self, headers: Headers) -> None:
        """See `BlockwiseCodec.check_headers`: the least and the greatest code must decode to numbers up to ~2**120."""
        scales, lows = headers[:, 0], headers[:, 1]
        # Written so that NaN fails. Where a product overflows, so does a comparison.
        with np.errstate(over="ignore", invalid="ignore"):
            fine = (scales >= 0) & (np.abs(lows) <= MAX_PEAK) & (np.float32(self.levels) * scales + lows <= MAX_DECODED)
        if not bool(fine.all()):
            raise CodecError(
                f"{self.name}: a block's scale is negative, or its scale or minimum is not finite or decodes to values "
                "beyond 2**120"
            )


class Int8AffineCodec(ByteCodes, AffineCodec):
    """One byte a value, with eight bytes more for each 256 values; a code is the quantised value, unsigned."""

    name = "int8a"
    version = 1
    levels = 255.0
    code_type = np.uint8


class Int4AffineCodec(HalfByteCodes, AffineCodec):
    """Four bits a value, with eight bytes more for each 128 values; a code is the quantised value, unsigned."""

    name = "int4a"
    version = 1
    levels = 15.0
    bias = 0.0
