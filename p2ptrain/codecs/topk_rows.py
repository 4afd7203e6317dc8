"""Rows of the `topk` format in NumPy: for short last chunks, and for machines without the native library.

`p2ptrain/native/codecs.c` does the same with whole chunks; both give the same bytes and bits. A row of
``columns`` values (4096, or fewer in the last one) keeps ``k = ceil(columns / 64)`` of them, and becomes::

    | low level, high level (bf16, little-endian) | buckets (2k bits) | negative, high (2k bits) | places (6k bits) |

Each of the three fields starts at a byte and is filled from the lowest bit on; bits beyond it are zero. See
`p2ptrain.codecs.topk.TopKCodec` for what they mean.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from p2ptrain.codecs.arrays import Bytes, Floats

CHUNK = 4096
BUCKET_BITS = 6
"""A bucket is 64 consecutive values, of which one is kept on average; a place within it takes 6 bits."""
LEVEL_BYTES = 4
MAGNITUDE = 0x7FFF_FFFF
"""All bits of an fp32 but its sign; as integers, magnitudes have the order of the numbers."""
MIN_LEVEL = 2.0**-100
MIN_LEVEL_BITS = 0x0D80
MAX_LEVEL_BITS = 0x7B80
"""``2**-100`` and ``2**120`` in bf16."""
MAX_MAGNITUDE = MAX_LEVEL_BITS << 16
"""``2**120`` in fp32; infinities and NaN are beyond it too."""

WELL_FORMED, BAD_LEVEL, BAD_INDEX, BAD_PADDING = 0, 1, 2, 3

Integers = npt.NDArray[np.int32]


def kept_values(columns: int) -> int:
    """Return the number of values kept of a row: one of 64, rounded up."""
    return -(-columns >> BUCKET_BITS)


def field_bytes(columns: int) -> tuple[int, int, int]:
    """Bytes of the three fields of a row: buckets, codes, places."""
    kept = kept_values(columns)
    return -(-2 * kept // 8), -(-2 * kept // 8), -(-BUCKET_BITS * kept // 8)


def row_bytes(columns: int) -> int:
    """Bytes of a row."""
    return LEVEL_BYTES + sum(field_bytes(columns))


def encode(bits: Integers, out: Bytes) -> bool:
    """Encode fp32 values, given as their bits.

    Args:
        bits: ``[rows, columns]``.
        out: ``[rows, row_bytes(columns)]``, overwritten.

    Returns:
        False when a value is not finite or beyond ``2**120`` in magnitude; ``out`` then holds anything.
    """
    rows, columns = bits.shape
    kept = kept_values(columns)
    magnitudes = bits & np.int32(MAGNITUDE)
    if int(magnitudes.max()) > MAX_MAGNITUDE:
        return False
    # The lowest index wins a tie: keys are distinct, so every way to select gives the same.
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
    """The two levels with the least squared error, from the bits of magnitudes ``[rows, kept]``.

    The best two groups are the ``s`` smallest and the rest, for the ``s`` that maximises
    ``sum(smallest)**2 / s + sum(rest)**2 / (kept - s)``, each at its mean; all ``s`` are tried.

    Returns:
        Which values get the higher level, ``[rows, kept]``; and the levels' bits in bf16, ``[rows, 2]``.
    """
    rows, kept = magnitudes.shape
    order = np.argsort(magnitudes, axis=1, kind="stable")
    # In fp64, where sums of squares of fp32 numbers neither overflow nor vanish; accumulated one by one.
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
    """Return the first fault of encoded rows ``[rows, row_bytes(columns)]``: one of the constants above."""
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
    """Add ``weight`` times the decoded rows to ``out`` (``[rows, columns]``).

    Returns:
        False when `check` would find a wrong number of indices, or one out of range; ``out`` then holds anything. Any
        bytes are safe to decode.
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
    """The largest magnitude of all levels of encoded rows, NaN or infinity if one is; rows are ``[rows, bytes]``."""
    levels = (data[:, :LEVEL_BYTES].copy().view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return float(np.abs(levels).max())


def _fields(data: Bytes, columns: int) -> list[Bytes]:
    """The bits of the three fields, padding included, each ``[rows, bits]``."""
    ends = np.cumsum((LEVEL_BYTES, *field_bytes(columns)))
    return [np.unpackbits(data[:, start:end], axis=1, bitorder="little") for start, end in itertools.pairwise(ends)]


def _indices(data: Bytes, columns: int) -> npt.NDArray[np.int64] | None:
    """Columns of the kept values, ``[rows, kept]``; None when there are not as many, or one is out of range."""
    kept = kept_values(columns)
    buckets, _, places = _fields(data, columns)
    if not bool((buckets[:, : 2 * kept].sum(axis=1, dtype=np.int64) == kept).all()):
        return None
    positions = np.nonzero(buckets[:, : 2 * kept])[1].reshape(len(data), kept)
    bits = places[:, : BUCKET_BITS * kept].reshape(len(data), kept, BUCKET_BITS)
    low = (bits.astype(np.int64) << np.arange(BUCKET_BITS)).sum(axis=2)
    indices = (positions - np.arange(kept) << BUCKET_BITS) + low
    return indices if bool((indices < columns).all()) else None
