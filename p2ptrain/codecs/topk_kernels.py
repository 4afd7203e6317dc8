"""Whole rows of the `topk` format in numba: the functions of `p2ptrain.codecs.topk_rows`, byte for byte.

Never compiled with ``fastmath``: each fp operation is rounded by itself, in the order in which it is written.

Selecting the 64 largest of 4096 magnitudes takes one pass to find a threshold, and one to collect what reaches it.
The first keeps the largest of each of 256 groups; a number that 64 of these reach is reached by 64 values, and hardly
more than that where the large values lie scattered (1.2 times as many in random data). Few candidates are left, among
which bisection of their bits finds the exact threshold.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from p2ptrain.codecs.arrays import Bytes, Floats
from p2ptrain.codecs.topk_rows import (
    BAD_INDEX,
    BAD_LEVEL,
    CHUNK,
    LEVEL_BYTES,
    MAGNITUDE,
    MAX_LEVEL_BITS,
    MAX_MAGNITUDE,
    MIN_LEVEL,
    MIN_LEVEL_BITS,
    WELL_FORMED,
    Integers,
    field_bytes,
    kept_values,
)

KEPT = kept_values(CHUNK)
GROUPS = 256
ENOUGH = 72
"""Bisection for the first threshold stops when it is reached by so many groups or fewer."""
BUCKETS_AT = LEVEL_BYTES
CODES_AT = BUCKETS_AT + field_bytes(CHUNK)[0]
PLACES_AT = CODES_AT + field_bytes(CHUNK)[1]


@njit(nogil=True, cache=True)
def _threshold(magnitudes: Integers, length: int, low: int, high: int, enough: int) -> int:
    """A number that between `KEPT` and ``enough`` of the first ``length`` magnitudes reach.

    When ties leave no such number, the largest that `KEPT` reach. At least `KEPT` must reach ``low``, and fewer
    ``high``.
    """
    while high - low > 1:
        middle = low + (high - low) // 2
        limit, reached = np.int32(middle), np.int32(0)
        for i in range(length):
            # In 32 bits, as the magnitudes are: twice as many fit into a vector register.
            reached = np.int32(reached + np.int32(magnitudes[i] >= limit))
        if reached < KEPT:
            high = middle
        else:
            low = middle
            if reached <= enough:
                break
    return low


@njit(nogil=True, cache=True)
def _select(bits: Integers, row: int, magnitudes: Integers, candidates: Integers, flags: Bytes) -> bool:
    """Put the columns of the `KEPT` largest magnitudes of a row, in order, at the start of ``candidates``.

    False when one of the row is not finite or too large.

    Args:
        bits: ``[rows, CHUNK]``, int32.
        row: Which row.
        magnitudes: Room for `CHUNK` int32; the magnitudes of these columns are at its start afterwards.
        candidates: Room for `CHUNK` int32.
        flags: Room for `CHUNK` uint8.
    """
    mask = np.int32(MAGNITUDE)
    for group in range(GROUPS):
        magnitudes[group] = bits[row, group] & mask
    for start in range(GROUPS, CHUNK, GROUPS):
        for group in range(GROUPS):
            magnitudes[group] = max(magnitudes[group], bits[row, start + group] & mask)
    beyond = 0
    for group in range(GROUPS):
        beyond = max(beyond, int(magnitudes[group]) + 1)
    if beyond > MAX_MAGNITUDE + 1:
        return False
    least = np.int32(_threshold(magnitudes, GROUPS, 0, beyond, ENOUGH))
    for column in range(CHUNK):
        flags[column] = (bits[row, column] & mask) >= least
    found, words = 0, flags.view(np.uint64)
    for word in range(CHUNK // 8):
        if words[word]:
            for column in range(8 * word, 8 * word + 8):
                candidates[found] = column
                found += flags[column]
    for i in range(found):
        magnitudes[i] = bits[row, candidates[i]] & mask
    least = np.int32(_threshold(magnitudes, found, int(least), beyond, KEPT))
    ties = KEPT
    for i in range(found):
        ties -= magnitudes[i] > least
    kept = 0
    for i in range(found):
        value = magnitudes[i]
        tie = (value == least) & (ties > 0)
        ties -= tie
        candidates[kept] = candidates[i]
        magnitudes[kept] = value
        kept += (value > least) | tie
    return True


@njit(nogil=True, cache=True)
def _two_levels(
    magnitudes: Integers, ranks: Integers, values: Floats, sums: npt.NDArray[np.float64], levels: Floats
) -> int:
    """As in `topk_rows`: the two levels with the least squared error, as fp32, to ``levels``.

    Args:
        magnitudes: Bits of the `KEPT` magnitudes.
        ranks: `KEPT` int32; the position of each among all in ascending order, the first of equals first.
        values: Room for `KEPT` fp32.
        sums: Room for `KEPT` fp64.
        levels: Two fp32.

    Returns:
        The highest rank that gets the lower level.
    """
    bits = values.view(np.int32)
    for i in range(KEPT):
        rank = 0
        for j in range(i):
            rank += magnitudes[j] <= magnitudes[i]
        for j in range(i + 1, KEPT):
            rank += magnitudes[j] < magnitudes[i]
        ranks[i] = rank
        bits[rank] = magnitudes[i]
    total = 0.0
    for i in range(KEPT):
        total += np.float64(values[i])
        sums[i] = total
    split, best = 0, -1.0
    for i in range(KEPT - 1):
        rest = total - sums[i]
        score = sums[i] * sums[i] / np.float64(i + 1) + rest * rest / np.float64(KEPT - 1 - i)
        if score > best:
            split, best = i, score
    low = sums[split] / np.float64(split + 1)
    high = (total - sums[split]) / np.float64(KEPT - 1 - split)
    levels[0] = np.float32(low) if low >= MIN_LEVEL else np.float32(0)
    levels[1] = np.float32(high) if high >= MIN_LEVEL else np.float32(0)
    return split


@njit(nogil=True, cache=True)
def _write(out: Bytes, row: int, columns: Integers, codes: Integers, level_bits: npt.NDArray[np.uint32]) -> None:
    """Write one row: its kept columns, their codes (0 to 3) and the levels' bits in fp32."""
    for i in range(2):
        rounded = (np.int64(level_bits[i]) + 0x7FFF + ((np.int64(level_bits[i]) >> 16) & 1)) >> 16
        out[row, 2 * i] = rounded & 255
        out[row, 2 * i + 1] = rounded >> 8
    for i in range(BUCKETS_AT, CODES_AT):
        out[row, i] = 0
    for i in range(KEPT):
        position = (columns[i] >> 6) + i
        out[row, BUCKETS_AT + (position >> 3)] |= np.uint8(1 << (position & 7))
    for i in range(KEPT // 4):
        first = 4 * i
        out[row, CODES_AT + i] = codes[first] | codes[first + 1] << 2 | codes[first + 2] << 4 | codes[first + 3] << 6
        places = (
            (columns[first] & 63)
            | (columns[first + 1] & 63) << 6
            | (columns[first + 2] & 63) << 12
            | (columns[first + 3] & 63) << 18
        )
        for byte in range(3):
            out[row, PLACES_AT + 3 * i + byte] = places >> (8 * byte) & 255


@njit(nogil=True, cache=True)
def _encode(bits: Integers, out: Bytes) -> bool:
    magnitudes, candidates, flags = np.empty(CHUNK, np.int32), np.empty(CHUNK, np.int32), np.empty(CHUNK, np.uint8)
    ranks, codes = np.empty(KEPT, np.int32), np.empty(KEPT, np.int32)
    values, sums, levels = np.empty(KEPT, np.float32), np.empty(KEPT, np.float64), np.empty(2, np.float32)
    for row in range(len(bits)):
        if not _select(bits, row, magnitudes, candidates, flags):
            return False
        split = _two_levels(magnitudes, ranks, values, sums, levels)
        for i in range(KEPT):
            codes[i] = (bits[row, candidates[i]] < 0) | (ranks[i] > split) << 1
        _write(out, row, candidates, codes, levels.view(np.uint32))
    return True


@njit(nogil=True, cache=True)
def _read(data: Bytes, row: int, columns: Integers, codes: Integers) -> bool:
    """The kept columns of a row and their codes; False when there are not `KEPT`, or one is out of range."""
    kept = 0
    for byte in range(CODES_AT - BUCKETS_AT):
        field = data[row, BUCKETS_AT + byte]
        for bit in range(8):
            if field >> bit & 1:
                bucket = 8 * byte + bit - kept
                if kept == KEPT or bucket >= CHUNK >> 6:
                    return False
                columns[kept] = bucket << 6
                kept += 1
    if kept < KEPT:
        return False
    for i in range(KEPT // 4):
        places, at = np.int32(0), PLACES_AT + 3 * i
        places = np.int32(data[row, at]) | np.int32(data[row, at + 1]) << 8 | np.int32(data[row, at + 2]) << 16
        field = data[row, CODES_AT + i]
        for j in range(4):
            columns[4 * i + j] += places >> (6 * j) & 63
            codes[4 * i + j] = field >> (2 * j) & 3
    return True


@njit(nogil=True, cache=True)
def _check(data: Bytes) -> int:
    columns, codes = np.empty(KEPT, np.int32), np.empty(KEPT, np.int32)
    for row in range(len(data)):
        for i in range(2):
            level = np.int32(data[row, 2 * i]) | np.int32(data[row, 2 * i + 1]) << 8
            if level != 0 and (level < MIN_LEVEL_BITS or level > MAX_LEVEL_BITS):
                return BAD_LEVEL
        if not _read(data, row, columns, codes):
            return BAD_INDEX
        for i in range(KEPT - 1):
            if columns[i + 1] <= columns[i]:
                return BAD_INDEX
    return WELL_FORMED


@njit(nogil=True, cache=True)
def _add(data: Bytes, weight: np.float32, clear: bool, out: Floats) -> bool:
    columns, codes = np.empty(KEPT, np.int32), np.empty(KEPT, np.int32)
    bits, terms = np.empty(2, np.uint32), np.empty(4, np.float32)
    levels = bits.view(np.float32)
    for row in range(len(data)):
        if not _read(data, row, columns, codes):
            return False
        if clear:
            out[row, :] = np.float32(0)
        for i in range(2):
            bits[i] = (np.uint32(data[row, 2 * i]) | np.uint32(data[row, 2 * i + 1]) << 8) << 16
            terms[2 * i] = levels[i] * weight
            terms[2 * i + 1] = -terms[2 * i]
        for i in range(KEPT):
            out[row, columns[i]] += terms[codes[i]]
    return True


def encode(bits: Integers, out: Bytes) -> bool:
    """See `topk_rows.encode`."""
    return bool(_encode(bits, out))


def check(data: Bytes, columns: int = CHUNK) -> int:
    """See `topk_rows.check`."""
    return int(_check(data))


def add(data: Bytes, weight: np.float32, out: Floats) -> bool:
    """See `topk_rows.add`."""
    return bool(_add(data, weight, False, out))


def decode(data: Bytes, out: Floats) -> bool:
    """See `topk_rows.decode`."""
    return bool(_add(data, np.float32(1), True, out))
