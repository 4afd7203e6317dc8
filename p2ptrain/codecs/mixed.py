"""One vector in several codecs: small tensors more exactly than the rest.

Norms and biases are a tiny part of a model's values and suffer most from a coarse codec. They would share blocks with
weights of another magnitude, or miss the top-k. `by_size` gives them a codec of their own. Such a codec depends on
positions in the vector, so a slice needs its own codec: `Codec.part`.

Small buffers, such as those of batch norms, are always in fp32. A counter of batches would set the step of its block,
and a running variance that is off by such a step may be negative.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from p2ptrain.buffers import Buffer
from p2ptrain.codecs.base import Codec, check_vector

Span = tuple[int, int, Codec]
"""First value, end, and codec of a span."""


def by_size(
    codec: Codec,
    small_codec: Codec,
    sizes: Sequence[int],
    small_values: int,
    buffer_codec: Codec | None = None,
    num_buffers: int = 0,
) -> Codec:
    """Return a codec that encodes tensors of up to ``small_values`` values in ``small_codec``, others in ``codec``.

    Args:
        sizes: Number of values of each tensor, in the vector's order.
        buffer_codec: Of small ones among the last ``num_buffers`` tensors; None for ``small_codec``.
    """
    spans: list[Span] = []
    start, num_parameters = 0, len(sizes) - num_buffers
    for index, size in enumerate(sizes):
        small = small_codec if index < num_parameters or buffer_codec is None else buffer_codec
        chosen = small if size <= small_values else codec
        if spans and spans[-1][2] is chosen:
            spans[-1] = (spans[-1][0], start + size, chosen)
        elif size:
            spans.append((start, start + size, chosen))
        start += size
    return spans[0][2] if len(spans) == 1 else MixedCodec(spans)


@dataclass(frozen=True)
class _Segment:
    """Values encoded by one call of one codec, and the offset of their bytes."""

    start: int
    stop: int
    codec: Codec
    offset: int


class MixedCodec(Codec):
    """Encodes each span of a vector with its own codec; the bytes follow each other.

    Blocks are aligned to the vector, not to the span. A span that begins within a block of its codec starts with a
    shorter block, up to that block's end. So no multiple of `block_size`, the least common multiple of all spans, lies
    within a block. This costs at most one more block header per span.

    Unlike others, this codec encodes vectors of one length only; `part` returns the codec of a slice.

    Args:
        spans: They cover the vector in order, without gaps; none is empty or mixed itself.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self.block_size = math.lcm(*(codec.block_size for *_, codec in spans))
        self.lossy = any(codec.lossy for *_, codec in spans)
        self.sparse = any(codec.sparse for *_, codec in spans)
        names = dict.fromkeys(f"{codec.name}/{codec.version}" for *_, codec in spans)
        self.name = f"mixed({','.join(names)})"
        self._num_values = spans[-1][1]
        self._segments = _place([piece for span in spans for piece in _aligned(span)])

    def part(self, low: int, high: int) -> Codec:
        if not 0 <= low <= high <= self._num_values or any(
            cut % self.block_size and cut != self._num_values for cut in (low, high)
        ):
            raise ValueError(
                f"values {low} to {high} are no part of {self._num_values} cut at multiples of {self.block_size}"
            )
        if (low, high) == (0, self._num_values):
            return self
        clipped = [(max(s.start, low) - low, min(s.stop, high) - low, s.codec) for s in self._within(low, high)]
        if len(clipped) == 1:
            return clipped[0][2]
        piece = object.__new__(MixedCodec)
        piece.block_size, piece.lossy, piece.sparse, piece.name = self.block_size, self.lossy, self.sparse, self.name
        piece._num_values, piece._segments = high - low, _place(clipped)
        return piece

    def mapped(self, change: Callable[[Codec], Codec]) -> MixedCodec:
        """Return the codec with the same spans and the codecs that ``change`` returns for theirs."""
        spans = [(segment.start, segment.stop, change(segment.codec)) for segment in self._segments]
        return MixedCodec(spans)

    def encoded_bytes(self, num_values: int) -> int:
        """Return the size of the first ``num_values`` values."""
        if not 0 <= num_values <= self._num_values:
            raise ValueError(f"{self.name} encodes {self._num_values} values, not {num_values}")
        segments = self._within(0, num_values)
        if not segments:
            return 0
        last = segments[-1]
        return last.offset + last.codec.encoded_bytes(min(last.stop, num_values) - last.start)

    def encode_into(self, vector: torch.Tensor, out: bytearray | memoryview) -> None:
        values, view = check_vector(vector), self._view(out, len(vector))
        for segment in self._segments:
            segment.codec.encode_into(values[segment.start : segment.stop], self._bytes(view, segment))

    def decode_into(self, data: Buffer, out: torch.Tensor) -> None:
        values, view = check_vector(out), self._view(data, len(out))
        for segment in self._segments:
            segment.codec.decode_into(self._bytes(view, segment), values[segment.start : segment.stop])

    def accumulate_into(self, data: Buffer, weight: float, out: torch.Tensor) -> None:
        values, view = check_vector(out), self._view(data, len(out))
        for segment in self._segments:
            segment.codec.accumulate_into(self._bytes(view, segment), weight, values[segment.start : segment.stop])

    def validate(self, data: Buffer, num_values: int) -> None:
        view = self._view(data, num_values)
        for segment in self._segments:
            segment.codec.validate(self._bytes(view, segment), segment.stop - segment.start)

    def _view(self, data: Buffer, num_values: int) -> memoryview:
        """Return ``data`` as bytes of the checked length."""
        if num_values != self._num_values:
            raise ValueError(
                f"{self.name} encodes vectors of {self._num_values} values, not {num_values}: use `part` for a slice"
            )
        self._array(data, num_values)
        return memoryview(data).cast("B")

    def _bytes(self, view: memoryview, segment: _Segment) -> memoryview:
        return view[segment.offset : segment.offset + segment.codec.encoded_bytes(segment.stop - segment.start)]

    def _within(self, low: int, high: int) -> list[_Segment]:
        """Return the segments that hold any of the values ``[low, high)``."""
        if low == high:
            return []
        first = bisect_right(self._segments, low, key=lambda segment: segment.stop)
        last = bisect_right(self._segments, high - 1, key=lambda segment: segment.start)
        return self._segments[first:last]


def _aligned(span: Span) -> list[Span]:
    """Return the span cut at its first whole block."""
    start, stop, codec = span
    first_block = min(-(-start // codec.block_size) * codec.block_size, stop)
    cuts = sorted({start, first_block, stop})
    return [(low, high, codec) for low, high in pairwise(cuts)]


def _place(spans: Sequence[Span]) -> list[_Segment]:
    """Return segments with the offsets of the spans' bytes."""
    segments: list[_Segment] = []
    offset = 0
    for start, stop, codec in spans:
        segments.append(_Segment(start, stop, codec, offset))
        offset += codec.encoded_bytes(stop - start)
    return segments
