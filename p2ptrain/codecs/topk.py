"""``topk``: the largest values of each chunk, in two bits each.

The codec keeps the 64 largest magnitudes of each 4096 consecutive values: their indices, signs, and one of two
magnitudes (SparseLoCo, https://arxiv.org/abs/2508.15706, section 3). All other values decode to zero, so the codec
needs error feedback, which sends them once they have grown.

A chunk takes 84 bytes, 195 times fewer than in fp32::

     4   the two magnitudes ("levels"), bf16; chosen for the least squared error
    16   the 64-value bucket of each kept value
    16   sign and level of each kept value
    48   place of each kept value within its bucket, 6 bits

The buckets use the Elias-Fano code. The high 6 bits of the sorted indices are in unary: bit ``(index >> 6) + i`` is set
for the ``i``-th kept value. The low 6 bits are stored as they are. 64 indices take 64 bytes instead of the paper's 96;
the lower bound is 60, ``log2`` of 4096 over 64. (P. Elias, "Efficient storage and retrieval by content and address of
static files", JACM 21(2), 1974, section 3.)
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
"""Chunks per call: 1 MiB of fp32, which bounds NumPy's temporaries."""

_FAULTS = {
    topk_rows.BAD_LEVEL: "a level is negative, not finite or out of range",
    topk_rows.BAD_INDEX: "indices are not strictly ascending, or beyond the end",
    topk_rows.BAD_PADDING: "unused bits of the last chunk are not zero",
}


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
    block_size = topk_rows.CHUNK
    native_values = topk_rows.CHUNK
    lossy = True
    sparse = True
    refusal = "a value is not finite or beyond 2**120 in magnitude"

    def encoded_bytes(self, num_values: int) -> int:
        rows, rest = divmod(num_values, self.block_size)
        return rows * row_bytes(self.block_size) + (row_bytes(rest) if rest else 0)

    def encode_into(self, vector: torch.Tensor, out: bytearray | memoryview) -> None:
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
        """Refuses indices out of range; ``out`` is undefined then."""
        self._scatter("decode", data, 1.0, out)

    def accumulate_into(self, data: Buffer, weight: float, out: torch.Tensor) -> None:
        """Add ``level * weight`` with its sign to the kept values, and leave all others unchanged.

        Peers that accumulate the same contributions in the same order get equal bits.
        """
        self._scatter("accumulate", data, check_weight(weight), out)

    def validate(self, data: Buffer, num_values: int) -> None:
        array = byte_array(data, self.encoded_bytes(num_values), self.name)
        try:
            done = self._run_native("validate", array.ctypes.data, 0, num_values)
        except CodecError:
            done = 0  # The plain code below names the fault.
        for start, rows, columns in self._spans(done, num_values):
            encoded = self._rows(array, start, rows)
            for piece in chunks(rows, ROWS_AT_ONCE):
                fault = topk_rows.check(encoded[piece], columns)
                if fault != topk_rows.WELL_FORMED:
                    raise CodecError(f"topk: {_FAULTS[fault]}")

    def largest(self, data: Buffer, num_values: int) -> float:
        """Return the larger level of any chunk; see `Codec.largest`. Chunks of other encoders may not use it."""
        array = byte_array(data, self.encoded_bytes(num_values), self.name)
        peaks = [topk_rows.largest(self._rows(array, start, rows)) for start, rows, _ in self._spans(0, num_values)]
        return float(np.max(peaks, initial=0.0))

    def _scatter(self, operation: str, data: Buffer, weight: float, out: torch.Tensor) -> None:
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
        """Return encoded chunks from value ``start`` on, one per row, without a copy."""
        first = start // self.block_size * row_bytes(self.block_size)
        return array[first : first + rows * row_bytes(self.block_size)].reshape(rows, -1)
