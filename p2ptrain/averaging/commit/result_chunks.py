"""A result's encoded means in chunks that its certificate authenticates.

A certificate holds the root of a tree over short leaves of each share's mean (`p2ptrain.averaging.vector.chunks`).
A chunk is an aligned run of leaves; its hash is the tree's node above them. A receiver checks the sent hashes against
the certificate before it checks chunks. A mean that is a list of parts is one chunk.

The same trees prove the *provenance* of a delegate's contribution. Above level 0
(`p2ptrain.averaging.grouping.cells`) a contribution is the decoded result of a group of the level below, whose
certificate comes with it.

1. An owner draws ``averaging.spot_checks`` random chunks of each part that it received, to *trace* them.
2. The delegate shows the leaves of the means behind them, with their proofs up to the roots.
3. The owner decodes and encodes these again, and refuses the part if the bytes differ.

Means that are lists of parts have no leaves, and are not traced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta

from p2ptrain.averaging.protocol.certificate import Body, Certificate
from p2ptrain.averaging.vector.chunks import (
    MAX_DEPTH,
    NODE,
    SumTree,
    chunk_span,
    cut,
    leaf_hash,
    leaf_hashes,
    mean_tree,
    num_chunks,
    root_of_proof,
)
from p2ptrain.buffers import Buffer
from p2ptrain.codecs import Codec, CodecError, Decoder, PartList
from p2ptrain.errors import IntegrityError, PeerRefusedError, ProtocolError
from p2ptrain.hashing import bulk_hash
from p2ptrain.network.chunks.fetch import FetchOptions
from p2ptrain.network.chunks.messages import MAX_CHUNKS
from p2ptrain.network.rpc.channel import Channel, LeastRate
from p2ptrain.network.schema import Hash, Message, from_bytes, to_bytes
from p2ptrain.network.transport import PeerId
from p2ptrain.runtime import Runtime

if TYPE_CHECKING:
    import torch

Means = list[Buffer]

RESULT = "result"
"""Name under which peers serve chunks of results."""
RESULT_RATE = LeastRate(65536.0, 30.0)
"""Minimum rate of a source of a result, when no round waits for it."""
CHUNK_BYTES = 1 << 18
"""Target size of a chunk; one leaf if that is larger."""
HASH_WIRE_BYTES = 34
"""Size of an encoded `Hash`."""
Span = tuple[int, int]
"""Half-open range ``(first, end)`` of values or bytes."""
FRAMING_BYTES = 64


class ChunkHashes(Message, frozen=True):
    hashes: Annotated[tuple[Hash, ...], Meta(max_length=MAX_CHUNKS)]


@dataclass(frozen=True)
class _Span:
    """Position of a chunk: its share, its bytes in the share's mean, and the end of each leaf in the chunk."""

    share: int
    low: int
    high: int
    ends: tuple[int, ...]
    """Empty for a mean that has no leaves."""


class ResultChunks:
    """A complete or partial result; implements `Target` and `Supply` of `p2ptrain.network.chunks`.

    Attributes:
        means: Encoded mean of each share.
        hashes: Hashes of the chunks; empty until known.
        done: By chunk: 1 once it is here.
        changed: Set and replaced at each new chunk, and when the fetch is given up.
    """

    asks_at_once = True

    def __init__(
        self, runtime: Runtime, body: Body, codecs: Sequence[Decoder], leaf_values: int, means: Means | None = None
    ) -> None:
        """``body`` is certified and of this model; ``means`` are complete and verified, or None to fetch them."""
        self._runtime = runtime
        self._codecs = codecs
        self._spans = [
            span
            for share, (low, high) in enumerate(pairwise(body.bounds))
            for span in _spans(share, codecs[share], high - low, leaf_values)
        ]
        shares = zip(codecs, pairwise(body.bounds), strict=True)
        sizes = [codec.encoded_bytes(high - low) for codec, (low, high) in shares]
        self.body = body
        self.means: Means = means if means is not None else [runtime.buffers.lend(size) for size in sizes]
        self.hashes: tuple[bytes, ...] = ()
        self.done = bytearray([means is not None]) * len(self._spans)
        self.changed = asyncio.Event()
        self.expected_bytes = sum(sizes)
        self.num_chunks = len(self._spans)
        self.most_bytes = max((span.high - span.low for span in self._spans), default=0)
        self._is_given_up = False

    @property
    def is_complete(self) -> bool:
        return all(self.done)

    def _view(self, index: int) -> memoryview:
        span = self._spans[index]
        return memoryview(self.means[span.share])[span.low : span.high]

    def _wake(self) -> None:
        event, self.changed = self.changed, asyncio.Event()
        event.set()

    # --- serving --------------------------------------------------------------------------------------------------

    async def find_hashes(self) -> tuple[bytes, ...]:
        """Return the chunks' hashes; unless they are known, all chunks must be here."""
        if not self.hashes:
            chunks = ((span, self._view(index)) for index, span in enumerate(self._spans))
            self.hashes = await self._runtime.offload(lambda: tuple(_hash_of(*chunk) for chunk in chunks))
        return self.hashes

    async def describe(self) -> ChunkHashes:
        """See `Supply`."""
        return ChunkHashes(await self.find_hashes())

    async def read(self, index: int) -> memoryview:
        """See `Supply`.

        Raises:
            PeerRefusedError: The chunk is missing, and the fetch was given up.
        """
        while not self.done[index]:
            if self._is_given_up:
                raise PeerRefusedError("?", "this result did not come here either")
            await self.changed.wait()
        return self._view(index)

    # --- fetching -------------------------------------------------------------------------------------------------

    def wire_bytes(self, index: int) -> int:
        """See `Target`."""
        span = self._spans[index]
        return span.high - span.low

    async def wait_for_turn(self) -> None:
        """See `Target`."""

    async def agree(self, channel: Channel, options: FetchOptions) -> int:
        """See `Target`."""
        max_bytes = FRAMING_BYTES + HASH_WIRE_BYTES * self.num_chunks
        told = await channel.receive(ChunkHashes, options.open_seconds, max_bytes)
        await self.trust(channel.remote, told.hashes)
        return 0

    async def trust(self, peer: PeerId, hashes: tuple[bytes, ...]) -> None:
        """Store the chunks' hashes; raise `ProtocolError` if they do not match the certificate."""
        if self.hashes:
            return
        if len(hashes) != len(self._spans) or not await self._runtime.offload(self._are_right, hashes):
            raise ProtocolError(peer, "sent hashes of a result that do not match its certificate")
        self.hashes = hashes

    def _are_right(self, hashes: tuple[bytes, ...]) -> bool:
        nodes: dict[int, list[bytes]] = {}
        for span, node in zip(self._spans, hashes, strict=True):
            nodes.setdefault(span.share, []).append(node)
        return all(
            SumTree([(node, 0.0) for node in found]).root[0] == self.body.hashes[share]
            for share, found in nodes.items()
        )

    async def put(self, source: PeerId, index: int, received: memoryview) -> int:
        """See `Target`."""
        if await self._runtime.offload(_hash_of, self._spans[index], received) != self.hashes[index]:
            raise ProtocolError(source, "sent a chunk of a result that does not match its certificate")
        if not self.done[index]:
            self._view(index)[:] = received
            self.done[index] = 1
            self._wake()
        return len(received)

    def give_up(self) -> None:
        """Refuse all waits for missing chunks."""
        self._is_given_up = True
        self._wake()

    async def validate(self) -> None:
        """Raise `IntegrityError` unless all means are well-formed."""
        await self._runtime.offload(self._validate)

    def _validate(self) -> None:
        for mean, codec, (low, high) in zip(self.means, self._codecs, pairwise(self.body.bounds), strict=True):
            try:
                if high > low:
                    codec.validate(mean, high - low)
            except CodecError as error:
                raise IntegrityError(f"the result of round {self.body.round} is refused: {error}") from error


def _spans(share: int, codec: Decoder, num_values: int, leaf_values: int) -> list[_Span]:
    if not num_values:
        return []
    if isinstance(codec, PartList):
        return [_Span(share, 0, codec.encoded_bytes(num_values), ())]
    leaves = 1
    while 2 * leaves * codec.encoded_bytes(min(leaf_values, num_values)) <= CHUNK_BYTES:
        leaves *= 2
    spans = []
    for first, last in cut(num_values, leaf_values, leaves * leaf_values):
        low = codec.encoded_bytes(first)
        ends = [codec.encoded_bytes(end) - low for end in [*range(first + leaf_values, last, leaf_values), last]]
        spans.append(_Span(share, low, low + ends[-1], tuple(ends)))
    return spans


def _hash_of(span: _Span, data: memoryview) -> bytes:
    if not span.ends:
        return bulk_hash(data)
    return SumTree([(leaf, 0.0) for leaf in leaf_hashes(data, span.ends)]).root[0]


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
        values = torch.empty(chunks[-1].high - start, dtype=torch.float32)
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
