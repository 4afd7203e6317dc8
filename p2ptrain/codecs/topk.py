"""``topk``: the largest values of each chunk, in two bits each.

Of each 4096 consecutive values the 64 of largest magnitude are sent: which they are, their signs, and one of two
magnitudes (SparseLoCo, https://arxiv.org/abs/2508.15706, section 3). All others decode to zero, so this codec needs
error feedback, which brings them when they have grown.

A chunk takes 84 bytes, 195 times fewer than in fp32::

     4   the two magnitudes ("levels"), bf16; those that make the squared error least
    16   which 64-value buckets the kept values are in
    16   for each kept value, whether it is negative and which level it has
    48   for each kept value, its place within its bucket, 6 bits

The paper's 12 bits for an index would make it 116 bytes. But sorted indices need only 8: the low 6 bits as they are,
and the high 6 bits, which ascend, in unary: bit ``(index >> 6) + i`` is set for the ``i``-th kept value (P. Elias,
"Efficient storage and retrieval by content and address of static files", JACM 21(2), 1974, section 3). That is 64 bytes
for 64 indices whatever they are; no code can do with fewer than 60 (``log2`` of 4096 over 64).
"""

from __future__ import annotations

import numpy as np
import torch

from p2ptrain.codecs import topk_rows
from p2ptrain.codecs.arrays import (
    Buffer,
    Bytes,
    byte_array,
    check_vector,
    check_weight,
    chunks,
    writable_byte_array,
)  # fmt: skip
from p2ptrain.codecs.base import CodecError
from p2ptrain.codecs.native import NativeCodec
from p2ptrain.codecs.topk_rows import row_bytes

ROWS_AT_ONCE = 64
"""Chunks in one call: 1 MiB of fp32, so that temporaries of the NumPy code stay small."""

_FAULTS = {
    topk_rows.BAD_LEVEL: "a level is negative, not finite or out of range",
    topk_rows.BAD_INDEX: "indices are not strictly ascending, or beyond the end",
    topk_rows.BAD_PADDING: "unused bits of the last chunk are not zero",
}


class TopKCodec(NativeCodec):
    """The 64 largest of each 4096 values, with two magnitudes to each chunk; `p2ptrain.codecs.topk` has the format.

    A last chunk of ``n < 4096`` values keeps ``k = ceil(n / 64)``. Of equal magnitudes those with the lowest indices
    are kept. Kept magnitudes are split in two groups, the smaller and the larger ones, each of which decodes to its
    mean, rounded to bf16; the split is the one with the least squared error.

    Error bound for a chunk ``x`` whose kept values are ``x_K``, with ``H_k = 1 + 1/2 + ... + 1/k`` (``H_64 = 4.74``)
    and levels of ``2**-100`` or more::

        |decoded - x|^2 <= |x|^2 - (1 - 2**-16) |x_K|^2 / H_k <= (1 - (1 - 2**-16) k / (n H_k)) |x|^2

    So it is a contraction, which is what error feedback needs to converge (arXiv 1901.09847, assumption A). For a group
    of ``s`` values with mean ``m`` that decode to ``m (1 + d)``, the squared error is less than their squares by
    ``s m^2 (1 - d^2)``, and rounding to bf16 has ``d <= 2**-8``. The best split saves at least what the ``s`` largest
    alone at their mean ``A_s / s`` would, ``A_s^2 / s =: E_s``. As the i-th largest is at most ``A_i / i``, its square
    is at most ``E_i / i``, and so ``|x_K|^2 <= max(E) H_k``. The second step is that the kept are the largest.

    In fact much more is saved: the 64 largest values of a Gaussian chunk hold 12 % of its energy, and two levels lose
    one part in 250 of that. A level below ``2**-100`` is sent as zero (see `p2ptrain.codecs.blockwise`), and its values
    are lost.
    """

    name = "topk"
    version = 1
    block_size = topk_rows.CHUNK
    native_values = topk_rows.CHUNK
    lossy = True
    sparse = True
    refusal = "a value is not finite or beyond 2**120 in magnitude"

    def encoded_bytes(self, num_values: int) -> int:
        """84 bytes a chunk; a shorter last one takes fewer."""
        rows, rest = divmod(num_values, self.block_size)
        return rows * row_bytes(self.block_size) + (row_bytes(rest) if rest else 0)

    def encode_into(self, vector: torch.Tensor, out: bytearray | memoryview) -> None:
        """Refuse values that are not finite or beyond ``2**120``."""
        values = check_vector(vector)
        encoded = writable_byte_array(out, self.encoded_bytes(len(values)), self.name)
        done = self._run_native("encode", values.data_ptr(), encoded.ctypes.data, len(values))
        bits = values.numpy().view(np.int32)
        for start, rows, columns in self._spans(done, len(values)):
            matrix, data = bits[start : start + rows * columns].reshape(rows, columns), self._rows(encoded, start, rows)
            for piece in chunks(rows, ROWS_AT_ONCE):
                if not topk_rows.encode(matrix[piece], data[piece]):
                    raise CodecError(f"topk: {self.refusal}")

    def decode_into(self, data: Buffer, out: torch.Tensor) -> None:
        """Refuse indices that are out of range; ``out`` then holds anything."""
        self._scatter("decode", data, 1.0, out)

    def accumulate_into(self, data: Buffer, weight: float, out: torch.Tensor) -> None:
        """Add ``level * weight`` with its sign to the values that were kept, and leave the others alone.

        Contributions that each peer gathered from all others sum up to equal bits if all add them in one order.
        """
        self._scatter("accumulate", data, check_weight(weight), out)

    def validate(self, data: Buffer, num_values: int) -> None:
        """Check length, levels, padding, and that indices are in range and strictly ascend."""
        array = byte_array(data, self.encoded_bytes(num_values), self.name)
        try:
            done = self._run_native("validate", array.ctypes.data, 0, num_values)
        except CodecError:
            done = 0  # What is wrong, the plain code can tell.
        for start, rows, columns in self._spans(done, num_values):
            encoded = self._rows(array, start, rows)
            for piece in chunks(rows, ROWS_AT_ONCE):
                fault = topk_rows.check(encoded[piece], columns)
                if fault != topk_rows.WELL_FORMED:
                    raise CodecError(f"topk: {_FAULTS[fault]}")

    def largest(self, data: Buffer, num_values: int) -> float:
        """The larger level of any chunk: see `Codec.largest`. No value need have it in chunks that others made."""
        array = byte_array(data, self.encoded_bytes(num_values), self.name)
        peaks = [topk_rows.largest(self._rows(array, start, rows)) for start, rows, _ in self._spans(0, num_values)]
        return float(np.max(peaks, initial=0.0))

    def _scatter(self, operation: str, data: Buffer, weight: float, out: torch.Tensor) -> None:
        """Decode or accumulate."""
        values = check_vector(out)
        array = byte_array(data, self.encoded_bytes(len(values)), self.name)
        refusal = _FAULTS[topk_rows.BAD_INDEX]
        done = self._run_native(operation, array.ctypes.data, values.data_ptr(), len(values), weight, refusal)
        if operation == "decode":
            values[done:].zero_()
        for start, rows, columns in self._spans(done, len(values)):
            matrix, encoded = values[start : start + rows * columns].view(rows, columns), self._rows(array, start, rows)
            for piece in chunks(rows, ROWS_AT_ONCE):
                if not topk_rows.add(encoded[piece], np.float32(weight), matrix[piece].numpy()):
                    raise CodecError(f"topk: {refusal}")

    def _rows(self, array: Bytes, start: int, rows: int) -> Bytes:
        """Encoded chunks from value ``start`` on, one to a row, without a copy."""
        first = start // self.block_size * row_bytes(self.block_size)
        return array[first : first + rows * row_bytes(self.block_size)].reshape(rows, -1)
