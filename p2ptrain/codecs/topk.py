"""``topk``: the largest values of each chunk, in two bits each.

The codec keeps the 64 largest magnitudes of each 4096 consecutive values: their indices, signs, and one of two
magnitudes (SparseLoCo, https://arxiv.org/abs/2508.15706, section 3). All other values decode to zero, so the codec
needs error feedback, which sends them once they have grown.

A chunk of ``n`` values (4096, or fewer in the last one) keeps ``k = ceil(n / 64)``. It becomes a row of bytes: 84 for a
whole chunk, 195 times fewer than in fp32::

     4   the two magnitudes ("levels", low and high), bf16, little-endian; chosen for the least squared error
    16   the 64-value bucket of each kept value (2k bits)
    16   sign and level of each kept value (negative, high: 2k bits)
    48   place of each kept value within its bucket (6k bits)

Each of the last three fields starts at a byte and fills from the lowest bit; unused bits are zero.

The buckets use the Elias-Fano code. The high 6 bits of the sorted indices are in unary: bit ``(index >> 6) + i`` is set
for the ``i``-th kept value. The low 6 bits are stored as they are. 64 indices take 64 bytes instead of the paper's 96;
the lower bound is 60, ``log2`` of 4096 over 64. (P. Elias, "Efficient storage and retrieval by content and address of
static files", JACM 21(2), 1974, section 3.)

The functions for rows, in NumPy, are for short last chunks and for machines without the native library, which gives the
same bytes and bits for whole chunks.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from p2ptrain.buffers import Buffer
from p2ptrain.codecs.base import Bytes, CodecError, Floats, NativeCodec, chunks

CHUNK = 4096
ROWS_AT_ONCE = 64
"""Chunks per call: 1 MiB of fp32, which bounds NumPy's temporaries."""
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

BAD_LEVEL = "a level is negative, not finite or out of range"
BAD_INDEX = "indices are not strictly ascending, or beyond the end"
BAD_PADDING = "unused bits of the last chunk are not zero"

Integers = npt.NDArray[np.int32]


class TopKCodec(NativeCodec):
    """The 64 largest of each 4096 values, with two magnitudes per chunk; `p2ptrain.codecs.topk` has the format.

    A last chunk of ``n < 4096`` values keeps ``k = ceil(n / 64)``. Ties go to the lowest indices. The kept magnitudes
    form two groups, the smaller and the larger ones. Each group decodes to its mean, rounded to bf16, and the split is
    the one with the least squared error. A level below ``2**-100`` becomes zero, as in `p2ptrain.codecs.blockwise`.

    Error bound for a chunk ``x`` with kept values ``x_K``, ``H_k = 1 + 1/2 + ... + 1/k`` (``H_64 = 4.74``), and levels
    of ``2**-100`` or more::

        |decoded - x|^2 <= |x|^2 - (1 - 2**-16) |x_K|^2 / H_k <= (1 - (1 - 2**-16) k / (n H_k)) |x|^2

    So the codec is a contraction, as error feedback needs to converge (arXiv 1901.09847, assumption A). Proof: a group
    of ``s`` values with mean ``m``, decoded to ``m (1 + d)``, has ``s m^2 (1 - d^2)`` less squared error than the sum
    of its squares. Rounding to bf16 has ``d <= 2**-8``. For every ``s``, the best split saves at least as much as the
    ``s`` largest values alone at their mean: ``E_s = A_s^2 / s``, with ``A_s`` their sum. The i-th largest value is at
    most ``A_i / i``, so its square is at most ``E_i / i``, and ``|x_K|^2 <= max(E) H_k``. The second inequality holds
    because the kept values are the largest.
    """

    name = "topk"
    version = 1
    block_size = native_values = CHUNK
    lossy = True
    sparse = True
    refusal = "a value is not finite or beyond 2**120 in magnitude"
    refusal_of_bytes = BAD_INDEX

    def encoded_bytes(self, num_values: int) -> int:
        rows, rest = divmod(num_values, self.block_size)
        return rows * _row_bytes(self.block_size) + (_row_bytes(rest) if rest else 0)

    def _encode(self, values: torch.Tensor, encoded: Bytes, done: int) -> None:
        bits = values.numpy().view(np.int32)
        for start, rows, columns in self._spans(done, len(values)):
            matrix, data = bits[start : start + rows * columns].reshape(rows, columns), self._rows(encoded, start, rows)
            for piece in chunks(rows, ROWS_AT_ONCE):
                if not _encode(matrix[piece], data[piece]):
                    raise CodecError(f"topk: {self.refusal}")

    def _decode(self, encoded: Bytes, values: torch.Tensor, done: int) -> None:
        """Refuses indices out of range; ``values`` are undefined then."""
        values[done:].zero_()
        self._accumulate(encoded, 1.0, values, done)

    def _accumulate(self, encoded: Bytes, weight: float, values: torch.Tensor, done: int) -> None:
        """Add ``level * weight`` with its sign to the kept values, and leave all others unchanged.

        Peers that accumulate the same contributions in the same order get equal bits.
        """
        for start, rows, columns in self._spans(done, len(values)):
            matrix, data = values[start : start + rows * columns].view(rows, columns), self._rows(encoded, start, rows)
            for piece in chunks(rows, ROWS_AT_ONCE):
                if not _add(data[piece], np.float32(weight), matrix[piece].numpy()):
                    raise CodecError(f"topk: {BAD_INDEX}")

    def validate(self, data: Buffer, num_values: int) -> None:
        array = self._array(data, num_values)
        try:
            done = self._run_native("validate", array.ctypes.data, 0, num_values)
        except CodecError:
            done = 0  # The plain code below names the fault.
        for start, rows, columns in self._spans(done, num_values):
            encoded = self._rows(array, start, rows)
            for piece in chunks(rows, ROWS_AT_ONCE):
                if fault := _check(encoded[piece], columns):
                    raise CodecError(f"topk: {fault}")

    def largest(self, data: Buffer, num_values: int) -> float:
        """Return the larger level of any chunk; see `Codec.largest`. Chunks of other encoders may not use it."""
        array = self._array(data, num_values)
        peaks = [np.abs(_levels(self._rows(array, start, rows))).max() for start, rows, _ in self._spans(0, num_values)]
        return float(np.max(peaks, initial=0.0))

    def _rows(self, array: Bytes, start: int, rows: int) -> Bytes:
        """Return encoded chunks from value ``start`` on, one per row, without a copy."""
        first = start // self.block_size * _row_bytes(self.block_size)
        return array[first : first + rows * _row_bytes(self.block_size)].reshape(rows, -1)


def _kept_values(columns: int) -> int:
    """Return the number of kept values of a row: one of 64, rounded up."""
    return -(-columns >> BUCKET_BITS)


def _field_bytes(columns: int) -> tuple[int, int, int]:
    """Return the sizes of the three fields of a row: buckets, codes, places."""
    kept = _kept_values(columns)
    return -(-2 * kept // 8), -(-2 * kept // 8), -(-BUCKET_BITS * kept // 8)


def _row_bytes(columns: int) -> int:
    return LEVEL_BYTES + sum(_field_bytes(columns))


def _encode(bits: Integers, out: Bytes) -> bool:
    """Encode fp32 values, given as bits ``[rows, columns]``, into ``out`` ``[rows, _row_bytes(columns)]``.

    Returns False if a value is not finite or beyond ``2**120`` in magnitude; ``out`` is undefined then.
    """
    rows, columns = bits.shape
    kept = _kept_values(columns)
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
    for field, size in zip(fields, _field_bytes(columns), strict=True):
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


def _check(data: Bytes, columns: int) -> str:
    """Return the first fault of encoded rows ``[rows, _row_bytes(columns)]``; empty without one."""
    levels = data[:, :LEVEL_BYTES].copy().view("<u2")
    if not bool(((levels == 0) | ((levels >= MIN_LEVEL_BITS) & (levels <= MAX_LEVEL_BITS))).all()):
        return BAD_LEVEL
    for field, bits in zip(_fields(data, columns), (2, 2, BUCKET_BITS), strict=True):
        if bool(field[:, bits * _kept_values(columns) :].any()):
            return BAD_PADDING
    indices = _indices(data, columns)
    if indices is None or bool((indices[:, 1:] <= indices[:, :-1]).any()):
        return BAD_INDEX
    return ""


def _add(data: Bytes, weight: np.float32, out: Floats) -> bool:
    """Add ``weight`` times the decoded rows to ``out`` (``[rows, columns]``). Any bytes are safe to decode.

    Returns False for a wrong number of indices, or one out of range; ``out`` is undefined then.
    """
    columns = out.shape[1]
    indices = _indices(data, columns)
    if indices is None:
        return False
    levels, kept = _levels(data), _kept_values(columns)
    codes = _fields(data, columns)[1][:, : 2 * kept].reshape(len(data), kept, 2)
    with np.errstate(over="ignore"):
        terms = np.take_along_axis(levels * weight, codes[:, :, 1].astype(np.int64), axis=1)
    np.negative(terms, out=terms, where=codes[:, :, 0].astype(np.bool_))
    for row, columns_of_row, terms_of_row in zip(out, indices, terms, strict=True):
        row[columns_of_row] += terms_of_row
    return True


def _levels(data: Bytes) -> Floats:
    """Return the levels of encoded rows, ``[rows, 2]``."""
    return (data[:, :LEVEL_BYTES].copy().view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _fields(data: Bytes, columns: int) -> list[Bytes]:
    """Return the bits of the three fields, padding included, each ``[rows, bits]``."""
    ends = np.cumsum((LEVEL_BYTES, *_field_bytes(columns)))
    return [np.unpackbits(data[:, start:end], axis=1, bitorder="little") for start, end in itertools.pairwise(ends)]


def _indices(data: Bytes, columns: int) -> npt.NDArray[np.int64] | None:
    """Return the columns of the kept values, ``[rows, kept]``; None for a wrong count or an index out of range."""
    kept = _kept_values(columns)
    buckets, _, places = _fields(data, columns)
    if not bool((buckets[:, : 2 * kept].sum(axis=1, dtype=np.int64) == kept).all()):
        return None
    positions = np.nonzero(buckets[:, : 2 * kept])[1].reshape(len(data), kept)
    bits = places[:, : BUCKET_BITS * kept].reshape(len(data), kept, BUCKET_BITS)
    low = (bits.astype(np.int64) << np.arange(BUCKET_BITS)).sum(axis=2)
    indices = (positions - np.arange(kept) << BUCKET_BITS) + low
    return indices if bool((indices < columns).all()) else None
