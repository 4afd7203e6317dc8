"""Provenance of a delegate's contribution: proof that it is the result of the delegate's group.

Above level 0 (`p2ptrain.averaging.grouping.cells`) a contribution is the decoded result of a group of the level below,
whose certificate comes with it. The certificate holds the roots of trees over the chunks of the encoded means.

1. An owner draws ``averaging.spot_checks`` random chunks of each part that it received, to *trace* them.
2. The delegate shows the chunks of the means behind them, with their proofs up to the roots.
3. The owner decodes and encodes these again, and refuses the part if the bytes differ.

Means that are lists of parts have no chunks, and are not traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from p2ptrain.averaging.protocol.certificate import Body, Certificate
from p2ptrain.averaging.vector.chunks import (
    MAX_DEPTH,
    NODE,
    SumTree,
    chunk_span,
    leaf_hash,
    mean_tree,
    num_chunks,
    root_of_proof,
)
from p2ptrain.buffers import Buffer
from p2ptrain.codecs import Codec, CodecError, Decoder, PartList
from p2ptrain.errors import IntegrityError
from p2ptrain.network.schema import Message, from_bytes, to_bytes

if TYPE_CHECKING:
    import torch

Span = tuple[int, int]
"""Half-open range ``(first, end)`` of values or bytes."""
FRAMING_BYTES = 64


class ShownChunks(Message, frozen=True):
    """Encoded chunks of means, each with its proof up to the root."""

    chunks: tuple[tuple[bytes, bytes], ...]


class _Chunk(NamedTuple):
    """A chunk of a share's mean: values ``[low, high)`` of the vector."""

    share: int
    number: int
    low: int
    high: int


class Source:
    """A group's result as its certificate describes it: the layout of its chunks and their roots.

    Attributes:
        is_traceable: True if the means have chunks.
    """

    def __init__(self, body: Body, codecs: Sequence[Decoder], chunk: int) -> None:
        """``body`` is certified and of this model; ``chunk`` is `chunk_values` of its level's codec."""
        self.body = body
        self._codecs = codecs
        self._chunk = chunk
        self.is_traceable = not any(isinstance(codec, PartList) for codec in codecs)

    def chunks(self, low: int, high: int) -> list[_Chunk]:
        """Return the chunks that hold the values ``[low, high)``, in order."""
        found = []
        for share, (first, last) in enumerate(pairwise(self.body.bounds)):
            if first < high and low < last:
                begin, end = max(low, first) - first, min(high, last) - first
                for number in range(begin // self._chunk, num_chunks(end, self._chunk)):
                    found.append(_Chunk(share, number, *chunk_span(first, last, number, self._chunk)))
        return found

    def size(self, share: int) -> int:
        return self.body.bounds[share + 1] - self.body.bounds[share]

    def span_in_mean(self, chunk: _Chunk) -> Span:
        """Return the range of a chunk's bytes in its share's mean."""
        first, codec = self.body.bounds[chunk.share], self._codecs[chunk.share]
        return codec.encoded_bytes(chunk.low - first), codec.encoded_bytes(chunk.high - first)

    def max_bytes(self, spans: Sequence[Span]) -> int:
        """Return an upper bound of the bytes that `Origin.show` returns for ``spans``."""
        total = FRAMING_BYTES
        for chunk in [chunk for span in spans for chunk in self.chunks(*span)]:
            begin, end = self.span_in_mean(chunk)
            total += end - begin + NODE.size * MAX_DEPTH + FRAMING_BYTES
        return total

    def tree(self, share: int, mean: Buffer) -> SumTree:
        return mean_tree(self._codecs[share], mean, self.size(share), self._chunk)

    def check(
        self, low: int, spans: Sequence[Span], shown: bytes | bytearray | memoryview, part: Buffer, codec: Codec
    ) -> None:
        """Compare a delegate's encoded part, from value ``low`` on, with the chunks that the delegate showed.

        Args:
            spans: Ranges of the vector to compare; no codec block lies across two of them.
            shown: The reply of `Origin.show` for ``spans``.

        Raises:
            IntegrityError: The part does not come from this result, or the proof is missing or invalid.
        """
        pieces = from_bytes(ShownChunks, shown).chunks
        if len(pieces) != sum(len(self.chunks(*span)) for span in spans):
            raise IntegrityError("shows another number of chunks than were asked for")
        left = iter(pieces)
        for first, last in spans:
            codec_here = codec.part(first - low, last - low)
            begin, end = codec.encoded_bytes(first - low), codec.encoded_bytes(last - low)
            try:
                if codec_here.encode(self._values(first, last, left)) != memoryview(part)[begin:end]:
                    raise IntegrityError("does not bring its group's result")
            except CodecError as error:
                raise IntegrityError(f"shows a result that is refused: {error}") from error

    def _values(self, low: int, high: int, pieces: Iterator[tuple[bytes, bytes]]) -> torch.Tensor:
        """Return the values ``[low, high)`` of the result from the next shown chunks, and verify their proofs."""
        import torch

        chunks = self.chunks(low, high)
        start = chunks[0].low
        values = torch.empty(chunks[-1].high - start)
        for chunk in chunks:
            data, proof = next(pieces)
            root = root_of_proof(leaf_hash(data), proof, chunk.number, num_chunks(self.size(chunk.share), self._chunk))
            if root is None or root[0] != (self.body.hashes[chunk.share], 0.0):
                raise IntegrityError("shows something else than its group's result")
            first, out = self.body.bounds[chunk.share], values[chunk.low - start : chunk.high - start]
            codec = self._codecs[chunk.share].part(chunk.low - first, chunk.high - first)
            codec.validate(data, len(out))
            codec.decode_into(data, out)
        return values[low - start : high - start]


class Origin:
    """A delegate's contribution: a group's result whose means the delegate holds.

    Attributes:
        credential: The certificate, in wire form.
    """

    def __init__(self, certificate: Certificate, means: Sequence[Buffer], source: Source) -> None:
        self.credential = certificate.to_bytes()
        self._source = source
        self._means = means
        self._trees: dict[int, SumTree] = {}

    def show(self, spans: Sequence[Span]) -> bytes:
        """Return the encoded chunks behind ``spans`` of the vector, with proofs, for `Source.check`."""
        shown = []
        for chunk in [chunk for span in spans for chunk in self._source.chunks(*span)]:
            if chunk.share not in self._trees:
                self._trees[chunk.share] = self._source.tree(chunk.share, self._means[chunk.share])
            begin, end = self._source.span_in_mean(chunk)
            data = bytes(memoryview(self._means[chunk.share])[begin:end])
            shown.append((data, self._trees[chunk.share].proof(chunk.number)))
        return to_bytes(ShownChunks(tuple(shown)))
