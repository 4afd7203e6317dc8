"""Rows of the `topk` format in NumPy, for short last chunks and for machines without the native library.

`p2ptrain/native/codecs.c` gives the same bytes and bits for whole chunks. A row of ``columns`` values (4096, or fewer
in the last one) keeps ``k = ceil(columns / 64)`` of them, and becomes::

    | low level, high level (bf16, little-endian) | buckets (2k bits) | negative, high (2k bits) | places (6k bits) |

Each of the three fields starts at a byte and fills from the lowest bit; unused bits are zero. `p2ptrain.codecs.topk`
explains the fields.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from p2ptrain.codecs.arrays import Bytes, Floats

CHUNK = 4096
BUCKET_BITS = 6
"""A bucket is 64 consecutive values, one of them kept on average; a place within it takes 6 bits."""
LEVEL_BYTES = 4
MAGNITUDE = 0x7FFF_FFFF
"""Mask of all bits of an fp32 but its sign; magnitudes sort as integers."""
MIN_LEVEL = 2.0**-100
MIN_LEVEL_BITS = 0x0D80
MAX_LEVEL_BITS = 0x7B80
"""``2**-100`` and ``2**120`` in bf16."""
MAX_MAGNITUDE = MAX_LEVEL_BITS << 16
"""``2**120`` in fp32; the bits of infinities and NaN are larger."""

WELL_FORMED, BAD_LEVEL, BAD_INDEX, BAD_PADDING = 0, 1, 2, 3

Integers = npt.NDArray[np.int32]


def kept_values(columns: int) -> int:
    """Return the number of kept values of a row: one of 64, rounded up."""
    return -(-columns >> BUCKET_BITS)


def field_bytes(columns: int) -> tuple[int, int, int]:
    """Return the sizes of the three fields of a row: buckets, codes, places."""
    kept = kept_values(columns)
    return -(-2 * kept // 8), -(-2 * kept // 8), -(-BUCKET_BITS * kept // 8)


def row_bytes(columns: int) -> int:
    return LEVEL_BYTES + sum(field_bytes(columns))


def encode(bits: Integers, out: Bytes) -> bool:
    """Encode fp32 values, given as bits ``[rows, columns]``, into ``out`` ``[rows, row_bytes(columns)]``.

    Returns False if a value is not finite or beyond ``2**120`` in magnitude; ``out`` is undefined then.
    """
    rows, columns = bits.shape
    kept = kept_values(columns)
    magnitudes = bits & np.int32(MAGNITUDE)
    if int(magnitudes.max()) > MAX_MAGNITUDE:
        return False
    # The lowest index wins a tie. Keys are distinct, so every selection algorithm gives the same result.
    keys = (magnitudes.astype(np.int64) << 12) | (CHUNK - 1 - np.arange(columns))
    largest = np.partition(keys, columns - kept, axis=1)[:, columns - kept :]
    indices = np.sort(CHUNK - 1 - (largest & (CHUNK - 1)), axis=1)
    magnitudes = np.take_along_axis(magnitudes, indices, axis=1)
    negative = np.take_along_axis(bits, indices, axis=1) < 0
    large, levels = _two_levels(magnitudes)
    positions = (indices >> BUCKET_BITS) + np.arange(kept)
    buckets = np.zeros((rows, 2 * kept), dtype=np.bool_)
    np.put_along_axis(buckets, positions, True, axis=1)
    places = (indices & 63)[:, :, None] >> np.arange(BUCKET_BITS) & 1
    fields: tuple[npt.NDArray[Any], ...] = (buckets, np.stack((negative, large), axis=2), places)
    out[:, :LEVEL_BYTES] = levels.astype("<u2").view(np.uint8)
    start = LEVEL_BYTES
    for field, size in zip(fields, field_bytes(columns), strict=True):
        out[:, start : start + size] = np.packbits(field.reshape(rows, -1), axis=1, bitorder="little")
        start += size
    return True


def _two_levels(magnitudes: Integers) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint16]]:
    """Return a mask of the values at the higher level, ``[rows, kept]``, and the levels' bf16 bits, ``[rows, 2]``.

    The levels have the least squared error: of all splits into the ``s`` smallest magnitudes and the rest, the best one
    maximises ``sum(smallest)**2 / s + sum(rest)**2 / (kept - s)``.
    """
    rows, kept = magnitudes.shape
    order = np.argsort(magnitudes, axis=1, kind="stable")
    # fp64, where sums of squares of fp32 numbers neither overflow nor vanish; added one by one.
    sums = np.cumsum(np.take_along_axis(magnitudes, order, axis=1).view(np.float32).astype(np.float64), axis=1)
    total = sums[:, -1]
    if kept == 1:
        split, low, high = np.zeros(rows, dtype=np.int64), total, total
    else:
        smaller = np.arange(1, kept, dtype=np.float64)
        rest = total[:, None] - sums[:, :-1]
        score = sums[:, :-1] * sums[:, :-1] / smaller + rest * rest / (kept - smaller)
        split = np.argmax(score, axis=1)
        low = np.take_along_axis(sums, split[:, None], axis=1)[:, 0]
        low, high = low / (split + 1), (total - low) / (kept - 1 - split)
    ranks = np.empty_like(order)
    np.put_along_axis(ranks, order, np.arange(kept)[None, :], axis=1)
    return ranks > split[:, None], _to_bf16(np.stack((low, high), axis=1))


def _to_bf16(levels: npt.NDArray[np.float64]) -> npt.NDArray[np.uint16]:
    """Round to fp32 and then to bf16, ties to even; levels below `MIN_LEVEL` become zero."""
    bits = levels.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(levels < MIN_LEVEL, 0, rounded).astype(np.uint16)


def check(data: Bytes, columns: int) -> int:
    """Return the first fault of encoded rows ``[rows, row_bytes(columns)]`` as one of the constants above."""
    levels = data[:, :LEVEL_BYTES].copy().view("<u2")
    if not bool(((levels == 0) | ((levels >= MIN_LEVEL_BITS) & (levels <= MAX_LEVEL_BITS))).all()):
        return BAD_LEVEL
    for field, bits in zip(_fields(data, columns), (2, 2, BUCKET_BITS), strict=True):
        if bool(field[:, bits * kept_values(columns) :].any()):
            return BAD_PADDING
    indices = _indices(data, columns)
    if indices is None or bool((indices[:, 1:] <= indices[:, :-1]).any()):
        return BAD_INDEX
    return WELL_FORMED


def add(data: Bytes, weight: np.float32, out: Floats) -> bool:
    """Add ``weight`` times the decoded rows to ``out`` (``[rows, columns]``). Any bytes are safe to decode.

    Returns False for a wrong number of indices, or one out of range; ``out`` is undefined then.
    """
    columns = out.shape[1]
    indices = _indices(data, columns)
    if indices is None:
        return False
    levels = (data[:, :LEVEL_BYTES].copy().view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    kept = kept_values(columns)
    codes = _fields(data, columns)[1][:, : 2 * kept].reshape(len(data), kept, 2)
    with np.errstate(over="ignore"):
        terms = np.take_along_axis(levels * weight, codes[:, :, 1].astype(np.int64), axis=1)
    np.negative(terms, out=terms, where=codes[:, :, 0].astype(np.bool_))
    for row, columns_of_row, terms_of_row in zip(out, indices, terms, strict=True):
        row[columns_of_row] += terms_of_row
    return True


def largest(data: Bytes) -> float:
    """Return the largest magnitude of all levels of encoded rows ``[rows, bytes]``; NaN or infinity if one is."""
    levels = (data[:, :LEVEL_BYTES].copy().view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return float(np.abs(levels).max())


def _fields(data: Bytes, columns: int) -> list[Bytes]:
    """Return the bits of the three fields, padding included, each ``[rows, bits]``."""
    ends = np.cumsum((LEVEL_BYTES, *field_bytes(columns)))
    return [np.unpackbits(data[:, start:end], axis=1, bitorder="little") for start, end in itertools.pairwise(ends)]


def _indices(data: Bytes, columns: int) -> npt.NDArray[np.int64] | None:
    """Return the columns of the kept values, ``[rows, kept]``; None for a wrong count or an index out of range."""
    kept = kept_values(columns)
    buckets, _, places = _fields(data, columns)
    if not bool((buckets[:, : 2 * kept].sum(axis=1, dtype=np.int64) == kept).all()):
        return None
    positions = np.nonzero(buckets[:, : 2 * kept])[1].reshape(len(data), kept)
    bits = places[:, : BUCKET_BITS * kept].reshape(len(data), kept, BUCKET_BITS)
    low = (bits.astype(np.int64) << np.arange(BUCKET_BITS)).sum(axis=2)
    indices = (positions - np.arange(kept) << BUCKET_BITS) + low
    return indices if bool((indices < columns).all()) else None
