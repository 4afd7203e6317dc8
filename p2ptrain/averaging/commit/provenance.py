"""Where a delegate's contribution comes from: it shows chunks of its group's result, and an owner compares.

Above level 0 (`p2ptrain.averaging.grouping.cells`) a contribution is no peer's own: it is the decoded result of a group
of the level below, whose certificate came with it. That certificate names the encoded means by the roots of trees over
their chunks. So an owner has ``averaging.spot_checks`` chunks of each part that came, drawn at random, *traced*: the
delegate shows the chunks of the means that they were decoded from, and their ways to the roots; the owner decodes and
encodes them again, and finds the bytes that it received, or refuses the part.

Means that are lists of parts have no chunks, and are not traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from p2ptrain.averaging.protocol.certificate import Body, Certificate
from p2ptrain.averaging.vector.merkle_sum import MAX_DEPTH, NODE, SumTree, leaf_hash, root_of_proof
from p2ptrain.averaging.vector.reduce import chunk_span, mean_tree, num_chunks
from p2ptrain.buffers import Buffer
from p2ptrain.codecs import Codec, CodecError, Decoder, PartList
from p2ptrain.errors import IntegrityError
from p2ptrain.manifest import canonical_bytes

if TYPE_CHECKING:
    import torch

Span = tuple[int, int]
"""A value of the vector, and the one after the last of those that begin with it."""
FRAMING_BYTES = 64


class _Chunk(NamedTuple):
    """A chunk of a mean, whose values are ``[low, high)`` of the vector."""

    share: int
    number: int
    low: int
    high: int


class Source:
    """The result of a group, as far as a certificate tells: what is cut how, and named by which roots.

    Attributes:
        body: The result.
        is_traceable: Whether its means have chunks.
    """

    def __init__(self, body: Body, codecs: Sequence[Decoder], chunk: int) -> None:
        """
        Args:
            body: Certified, and one of this model.
            codecs: By share: how its mean is encoded; see `p2ptrain.averaging.commit.round_log.History.codecs_of`.
            chunk: `chunk_values` of that level's codec.
        """
        self.body = body
        self._codecs = codecs
        self._chunk = chunk
        self.is_traceable = not any(isinstance(codec, PartList) for codec in codecs)

    def chunks(self, low: int, high: int) -> list[_Chunk]:
        """Those that hold the values ``[low, high)``, in order."""
        found = []
        for share, (first, last) in enumerate(pairwise(self.body.bounds)):
            if first < high and low < last:
                begin, end = max(low, first) - first, min(high, last) - first
                for number in range(begin // self._chunk, num_chunks(end, self._chunk)):
                    found.append(_Chunk(share, number, *chunk_span(first, last, number, self._chunk)))
        return found

    def size(self, share: int) -> int:
        """Values in a share."""
        return self.body.bounds[share + 1] - self.body.bounds[share]

    def span_in_mean(self, chunk: _Chunk) -> Span:
        """First byte of a chunk in its share's mean, and the byte after its last."""
        first, codec = self.body.bounds[chunk.share], self._codecs[chunk.share]
        return codec.encoded_bytes(chunk.low - first), codec.encoded_bytes(chunk.high - first)

    def max_bytes(self, spans: Sequence[Span]) -> int:
        """More than it takes to show the origin of these values."""
        total = FRAMING_BYTES
        for chunk in [chunk for span in spans for chunk in self.chunks(*span)]:
            begin, end = self.span_in_mean(chunk)
            total += end - begin + NODE.size * MAX_DEPTH + FRAMING_BYTES
        return total

    def tree(self, share: int, mean: Buffer) -> SumTree:
        """The tree over the chunks of a share's mean."""
        return mean_tree(self._codecs[share], mean, self.size(share), self._chunk)

    def check(
        self, low: int, spans: Sequence[Span], shown: bytes | bytearray | memoryview, part: Buffer, codec: Codec
    ) -> None:
        """Hold a delegate's part against what it showed of this result.

        Args:
            low: The part's first value in the vector.
            spans: Which of its values are looked at; no block of a codec lies across two.
            shown: As `Origin.show` has it for these.
            part: Encoded.
            codec: How.

        Raises:
            IntegrityError: The part does not come from this result, or that was not shown.
        """
        pieces = _pieces(shown, sum(len(self.chunks(*span)) for span in spans))
        for first, last in spans:
            codec_here = codec.part(first - low, last - low)
            begin, end = codec.encoded_bytes(first - low), codec.encoded_bytes(last - low)
            try:
                if codec_here.encode(self._values(first, last, pieces)) != memoryview(part)[begin:end]:
                    raise IntegrityError("does not bring its group's result")
            except CodecError as error:
                raise IntegrityError(f"shows a result that is refused: {error}") from error

    def _values(self, low: int, high: int, pieces: Iterator[tuple[bytes, bytes]]) -> torch.Tensor:
        """The values ``[low, high)`` of the result, from the next chunks and proofs that were shown."""
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
    """What a delegate brings: a group's result whose means it holds.

    Attributes:
        credential: The certificate, in wire form.
    """

    def __init__(self, certificate: Certificate, means: Sequence[Buffer], source: Source) -> None:
        """
        Args:
            certificate: Of the result.
            means: Of all shares, encoded.
            source: The same result.
        """
        self.credential = certificate.to_bytes()
        self._source = source
        self._means = means
        self._trees: dict[int, SumTree] = {}

    def show(self, spans: Sequence[Span]) -> bytes:
        """The chunks that values ``spans`` of the vector come from, for `Source.check`."""
        shown = []
        for chunk in [chunk for span in spans for chunk in self._source.chunks(*span)]:
            begin, end = self._source.span_in_mean(chunk)
            data = bytes(memoryview(self._means[chunk.share])[begin:end])
            shown.append([data, self._tree(chunk.share).proof(chunk.number)])
        return canonical_bytes(shown)

    def _tree(self, share: int) -> SumTree:
        if share not in self._trees:
            self._trees[share] = self._source.tree(share, self._means[share])
        return self._trees[share]


def _pieces(shown: bytes | bytearray | memoryview, count: int) -> Iterator[tuple[bytes, bytes]]:
    """Chunks and proofs; raises `IntegrityError` unless there are so many."""
    try:
        values: Any = msgpack.unpackb(shown, raw=False, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise IntegrityError("shows what cannot be parsed") from error
    pairs = values if isinstance(values, list) else []
    if len(pairs) != count or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise IntegrityError("shows another number of chunks than were asked for")
    if not all(type(item) is bytes for pair in pairs for item in pair):
        raise IntegrityError("shows malformed chunks")
    return iter([(data, proof) for data, proof in pairs])
