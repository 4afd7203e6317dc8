"""A mean of sparse vectors as the weighted list of its parts, without encoding the sum.

The mean has up to as many times more non-zeros as there are vectors, so the sparse codec would lose most of it. The
list is lossless, and shorter than a dense encoding for few parts (`fewer_bytes_listed`). Each holder adds the parts in
the order of the list. SparseLoCo (https://arxiv.org/abs/2508.15706) gathers the contributions at every peer this way.

The bytes, for ``n`` parts of one length::

    4 n   the weights, fp32, little-endian: finite, not negative, sum of 1 or less
    ...   the parts as encoded by their senders, one after the other
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from p2ptrain.buffers import Buffer
from p2ptrain.codecs.base import Codec, CodecError, Decoder, byte_array, check_vector

if TYPE_CHECKING:
    import torch

WEIGHT = np.dtype("<f4")
MAX_TOTAL = 1 + 2**-20
"""Bound on the sum of weights: 1, plus the fp32 roundings of some hundred weights."""
UNDIVIDED = 1 << 62


def fewer_bytes_listed(codec: Codec, dense_codec: Codec, num_values: int, num_contributors: int) -> bool:
    """True if the list of all contributions in ``codec`` is shorter than their mean in ``dense_codec``.

    The contributions reach the owners in ``codec`` either way. The weights are not counted. Raises `ValueError` without
    contributors.
    """
    if num_contributors < 1:
        raise ValueError(f"{num_contributors} peers cannot average")
    return num_contributors * codec.encoded_bytes(num_values) < dense_codec.encoded_bytes(num_values)


class PartList(Decoder):
    """Decodes the weighted sum of parts from their list; the module's docstring has the format.

    A list cannot be cut, because the weights are at its beginning.

    Args:
        codec: Codec of each part.
        num_parts: Number of contributors to the mean; `ValueError` if less than 1.
    """

    block_size = UNDIVIDED

    def __init__(self, codec: Codec, num_parts: int) -> None:
        if num_parts < 1:
            raise ValueError("a mean has one contributor at least")
        self._codec = codec
        self._num_parts = num_parts

    def part(self, low: int, high: int) -> PartList:
        """Return the decoder for the same contributors' parts of a slice, such as a share."""
        return PartList(self._codec.part(low, high), self._num_parts)

    def encoded_bytes(self, num_values: int) -> int:
        part_bytes = self._codec.encoded_bytes(num_values)
        return self._num_parts * (WEIGHT.itemsize + part_bytes) if num_values else 0

    def write(self, weights: Sequence[float], parts: Sequence[Buffer], out: bytearray | memoryview) -> None:
        """Write the list into ``out``, which has exactly its length.

        ``weights`` are rounded to fp32. ``parts`` are valid in this codec, of one length, and in the common order of
        addition. Raises `CodecError` if a length is wrong, or `validate` would refuse the weights.
        """
        if not len(weights) == len(parts) == self._num_parts:
            raise CodecError(f"a list of {self._num_parts} parts cannot hold {len(parts)}, with {len(weights)} weights")
        view = memoryview(out).cast("B")
        start = self._num_parts * WEIGHT.itemsize
        if len(view) != start + sum(memoryview(part).nbytes for part in parts):
            raise CodecError(f"{len(view)} bytes are no room for these {len(parts)} parts and their weights")
        view[:start] = np.asarray(weights, WEIGHT).tobytes()
        _check_weights(np.frombuffer(view[:start], WEIGHT))
        for part in parts:
            encoded = memoryview(part).cast("B")
            view[start : start + len(encoded)] = encoded
            start += len(encoded)

    def decode_into(self, data: Buffer, out: torch.Tensor) -> None:
        """Add up weight times part in the list's order, with each product and each sum rounded to fp32."""
        values = check_vector(out)
        weights, parts = self.split(data, len(values))
        values.zero_()
        for weight, part in zip(weights, parts, strict=True):
            self._codec.accumulate_into(part, weight, values)

    def validate(self, data: Buffer, num_values: int) -> None:
        weights, parts = self.split(data, num_values)
        _check_weights(np.asarray(weights, WEIGHT))
        for index, part in enumerate(parts):
            try:
                self._codec.validate(part, num_values)
            except CodecError as error:
                raise CodecError(f"part {index + 1} of {len(parts)}: {error}") from error

    def largest(self, data: Buffer, num_values: int) -> float:
        """Return the largest magnitude among the parts, which a mean does not exceed, whatever the weights."""
        peaks = [self._codec.largest(part, num_values) for part in self.split(data, num_values)[1]]
        return math.nan if any(math.isnan(peak) for peak in peaks) else max(peaks, default=0.0)

    def split(self, data: Buffer, num_values: int) -> tuple[list[float], list[memoryview]]:
        """Return the weights and the encoded parts, without a copy; empty lists for no values."""
        byte_array(data, self.encoded_bytes(num_values), f"list of {self._num_parts} parts")
        if not num_values:
            return [], []
        view, start = memoryview(data).cast("B"), self._num_parts * WEIGHT.itemsize
        part_bytes = self._codec.encoded_bytes(num_values)
        parts = [view[start + i * part_bytes :][:part_bytes] for i in range(self._num_parts)]
        return np.frombuffer(view[:start], WEIGHT).tolist(), parts


def _check_weights(weights: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
    """Raise `CodecError` unless the weights can be those of a mean."""
    total = math.fsum(weights.tolist()) if bool(np.isfinite(weights).all()) else math.nan
    if not (total <= MAX_TOTAL and bool((weights >= 0).all())):
        raise CodecError("the weights of a mean's parts are not finite, negative, or more than 1 in sum")
