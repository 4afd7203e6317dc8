"""The owner's side of a share: check the parts, choose the contributors, and reduce.

1. `PartCheck` checks and measures each part while it arrives.
2. `OwnShare.judge` drops outliers when the owner closes its mask, before the group agrees on the contributors.
3. `OwnShare.reduce` combines the rest by the manifest's rule (`p2ptrain.averaging.vector.rules`), piece by piece. Each
   piece of the result can be sent while the next is computed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from p2ptrain.averaging.vector.aggregation import MIN_FOR_MEDIAN, out_of_proportion
from p2ptrain.averaging.vector.merkle_sum import Node, SumTree, leaf_hashes
from p2ptrain.averaging.vector.rules import VotingRule, WeightedRule, get_rule
from p2ptrain.averaging.vector.streaming import EncodedStream, cut
from p2ptrain.buffers import Buffer
from p2ptrain.codecs import Codec, CodecError, Decoder, PartList, get_codec
from p2ptrain.hashing import EMPTY_HASH, bulk_hash
from p2ptrain.manifest import AveragingSpec
from p2ptrain.runtime import Runtime

if TYPE_CHECKING:
    import torch

STACK_VALUES = 1 << 15
"""Values of each part that a rule by coordinate combines at a time; the stack of parts must fit a core's cache."""

RANGE_SLACK = 1.01
"""Factor by which encoded values may exceed ``max_value``, because a codec may round up."""


CHUNK_VALUES = 1 << 14
"""Base length of a chunk; see `chunk_values`. Equal for all members, because ``centered_clip`` takes distances per
chunk. Shorter chunks cost more to hash, longer ones more to reveal in an audit."""


def chunk_values(codec: Codec) -> int:
    """Return the length of a chunk: the unit of hashes, commitments and audits, in values.

    Chunk k of every part and of the mean covers the same values, whatever their codecs. The mean's chunk depends on
    the parts' chunks alone: no codec block and no input of a rule crosses a chunk border. See
    `p2ptrain.averaging.verification.audit`.
    """
    return math.lcm(CHUNK_VALUES, codec.block_size)


def num_chunks(num_values: int, chunk: int) -> int:
    """Return the number of chunks in a share of ``num_values`` values."""
    return -(-num_values // chunk)


def chunk_span(low: int, high: int, number: int, chunk: int) -> tuple[int, int]:
    """Return (start, stop) of chunk ``number`` of the share ``[low, high)``."""
    first = low + number * chunk
    return first, min(first + chunk, high)


def mean_root(codec: Decoder, mean: Buffer, num_values: int, chunk: int) -> bytes:
    """Return the digest that identifies an encoded mean: its `mean_tree` root, or the hash of a list of parts."""
    return bulk_hash(mean) if isinstance(codec, PartList) else mean_tree(codec, mean, num_values, chunk).root[0]


def mean_tree(codec: Decoder, mean: Buffer, num_values: int, chunk: int) -> SumTree:
    """Return the hash tree over the chunks of an encoded mean; all energies are zero.

    Args:
        mean: At least one value.
        chunk: `chunk_values` of the whole vector's codec.
    """
    ends = [codec.encoded_bytes(high) for _, high in cut(num_values, chunk, chunk)]
    return SumTree([(leaf, 0.0) for leaf in leaf_hashes(mean, ends)])


class RangeCheck:
    """Refuses pieces of an encoded share that are malformed or hold values beyond the manifest's ``max_value``."""

    def __init__(self, codec: Decoder, spec: AveragingSpec) -> None:
        self.codec = codec
        self._max_value = spec.max_value

    def __call__(self, piece: memoryview, low: int, high: int) -> None:
        """Check the values ``[low, high)`` of the share.

        Raises:
            CodecError: The piece is malformed, or a value is not finite or out of range.
        """
        codec = self.codec.part(low, high)
        codec.validate(piece, high - low)
        check_range(codec.largest(piece, high - low), self._max_value * RANGE_SLACK)


class PartCheck(RangeCheck):
    """A `RangeCheck` that also hashes and measures each chunk; the pieces must come in order.

    Attributes:
        leaves: Hash and energy of each chunk so far: `EMPTY_HASH` unless ``hashed``, 0 unless ``measured``.
    """

    codec: Codec

    def __init__(self, codec: Codec, spec: AveragingSpec, chunk: int, *, measured: bool, hashed: bool) -> None:
        super().__init__(codec, spec)
        self._chunk = chunk
        self._measured = measured
        self._hashed = hashed
        self.leaves: list[Node] = []

    def __call__(self, piece: memoryview, low: int, high: int) -> None:
        super().__call__(piece, low, high)
        if not (self._measured or self._hashed):
            return
        codec = self.codec.part(low, high)
        spans = cut(high - low, self._chunk, self._chunk)
        energies, hashes = [0.0] * len(spans), [EMPTY_HASH] * len(spans)
        if self._measured:
            energies = codec.squared_norms(piece, high - low, self._chunk)
        if self._hashed:
            hashes = leaf_hashes(piece, [codec.encoded_bytes(last) for _, last in spans])
        self.leaves += zip(hashes, energies, strict=True)


def check_range(largest: float, limit: float) -> None:
    """Raise `CodecError` if the largest magnitude is NaN or above the limit."""
    if not largest <= limit:
        raise CodecError(f"a value of magnitude {largest:.3g} is beyond the manifest's averaging.max_value")


def part_weights(spec: AveragingSpec, norms: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """Return the weight of each contributor's part under the manifest's rule."""
    rule = get_rule(spec)
    return rule.weights(spec, norms, tokens) if isinstance(rule, WeightedRule) else rule.shares(spec, tokens)


class OwnShare:
    """One owner's share in one attempt.

    Attributes:
        parts: By member: codec and bytes of its complete, valid part. The owner's own part is added by `reduce`, and
            only if it is encoded.
        refused: By member, owner included: the reason why `judge` left it out.
        trees: By member, owner included: the tree over its part's chunks.
        is_measured: Whether norms are computed; False in a group of one or two.
        own_part: The owner's own part, encoded by `measure_own`; None if it counts unencoded.
    """

    def __init__(
        self,
        codec: Codec,
        spec: AveragingSpec,
        own: torch.Tensor,
        own_index: int,
        num_members: int,
        own_codec: Codec | None = None,
        lists_parts: bool = False,
        *,
        chunk: int = 0,
        audited: bool = False,
    ) -> None:
        """
        Args:
            codec: Codec of the result, unless that is a list of parts.
            own: The owner's own part, fp32, ``[num_values]``; not changed.
            own_codec: Codec that the owner's own part passes through before it counts; None if it counts unencoded.
                Set it for a sparse codec, where an unencoded part would have a larger norm than the others'.
            lists_parts: Whether the result is a `PartList` of parts in ``own_codec``.
            chunk: `chunk_values` of the whole vector's codec; 0 if ``codec`` is that codec.
            audited: Whether members audit the result: then parts are hashed, and kept after `reduce`.

        Raises:
            ValueError: ``lists_parts`` without ``own_codec``.
        """
        if lists_parts and own_codec is None:
            raise ValueError("a list of parts needs the owner's own part encoded")
        self._codec = codec
        self._own_codec = own_codec
        self._lists_parts = lists_parts
        self._spec = spec
        self._own = own
        self._own_index = own_index
        self._audited = audited
        self._chunk = chunk or chunk_values(codec)
        self.is_measured = num_members >= MIN_FOR_MEDIAN
        self.trees: dict[int, SumTree] = {}
        self.parts: dict[int, tuple[Codec, Buffer]] = {}
        self.refused: dict[int, str] = {}
        self.own_part: Buffer | None = None

    def new_check(self, codec: Codec) -> PartCheck:
        """Return a new check for one part in this codec."""
        return PartCheck(codec, self._spec, self._chunk, measured=self.is_measured, hashed=self._audited)

    def measure_own(self) -> None:
        """Check and measure the owner's own part, and encode it if it has a codec; runs in a pool thread.

        Raises:
            CodecError: A value is not finite or beyond ``max_value``, or cannot be encoded.
        """
        if self._own_codec is not None:
            self._encode_own(self._own_codec)
            return
        plain = get_codec("fp32")
        leaves: list[Node] = []
        for low, high in cut(len(self._own), self._codec.block_size):
            piece = self._own[low:high]
            least, greatest = (float(extreme) for extreme in piece.aminmax())  # a NaN makes both NaN
            check_range(max(-least, greatest), self._spec.max_value)
            if self.is_measured:
                energies = plain.squared_norms(piece.detach().numpy().data.cast("B"), high - low, self._chunk)
                leaves += [(EMPTY_HASH, energy) for energy in energies]
            else:
                leaves += [(EMPTY_HASH, 0.0)] * len(cut(high - low, self._chunk, self._chunk))
        self.trees[self._own_index] = SumTree(leaves or [(EMPTY_HASH, 0.0)])

    def _encode_own(self, codec: Codec) -> None:
        part, check = codec.encode(self._own), self.new_check(codec)
        for low, high in cut(len(self._own), codec.block_size):
            check(memoryview(part)[codec.encoded_bytes(low) : codec.encoded_bytes(high)], low, high)
        self.own_part = part
        self.trees[self._own_index] = SumTree(check.leaves or [(EMPTY_HASH, 0.0)])

    def add(self, index: int, part: Buffer, check: PartCheck, tree: SumTree | None = None) -> None:
        """Add another member's part, with its passed check and, if known, the tree over its leaves."""
        self.parts[index] = check.codec, part
        self.trees[index] = tree or SumTree(check.leaves or [(EMPTY_HASH, 0.0)])

    def judge(self) -> frozenset[int]:
        """Refuse the parts that are `out_of_proportion`; return the owner's mask, the members that remain."""
        for index, multiple in out_of_proportion(self.norms(), self._spec.max_norm_ratio).items():
            self.refused[index] = f"sent a part whose norm is {multiple:.3g} times the group's median"
            self.parts.pop(index, None)
        return frozenset(self.trees.keys() - self.refused.keys())

    def forget(self) -> None:
        """Release all parts once no member can audit them."""
        self.parts.clear()

    def norms(self) -> dict[int, float]:
        """Return the Euclidean norm of each member's part; zeros in a group of one or two."""
        return {index: math.sqrt(tree.root[1]) for index, tree in self.trees.items()}

    async def reduce(
        self, runtime: Runtime, contributors: Sequence[int], tokens: Sequence[int], mean: EncodedStream
    ) -> ExactMean | None:
        """Combine the contributors' parts and encode the result, piece by piece.

        Releases the parts afterwards unless the share is audited. A list of parts always releases them.

        Args:
            contributors: Roster indices, ascending; each has a part here.
            mean: Output stream; grows with each piece.

        Returns:
            The result before encoding; None if the encoding is lossless.

        Raises:
            CodecError: The result cannot be encoded.
        """
        import torch

        weights = self.weights(contributors, tokens)
        if self.own_part is not None and self._own_codec is not None:
            self.parts[self._own_index] = self._own_codec, self.own_part
        if self._lists_parts:
            await runtime.offload(self._list_parts, contributors, weights, mean.data)
            mean.grow(len(mean.data))
            self.parts.clear()
            return None
        spans = self.spans()
        exact = torch.empty(spans[0][1], dtype=torch.float32)  # one piece, to fit a core's cache
        for low, high in spans:
            await runtime.offload(self.reduce_piece, low, high, contributors, weights, exact[: high - low], mean.data)
            mean.grow(self._codec.encoded_bytes(high))
        found = ExactMean(self, contributors, weights) if self._codec.lossy else None
        if not self._audited:
            self.parts.clear()
        return found

    def weights(self, contributors: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Return the contributors' `part_weights`."""
        norms = self.norms()
        return part_weights(self._spec, [norms[index] for index in contributors], tokens)

    def _list_parts(self, contributors: Sequence[int], weights: list[float], encoded: bytearray | memoryview) -> None:
        assert self._own_codec is not None
        parts = [self.parts[index][1] for index in contributors]
        PartList(self._own_codec, len(parts)).write(weights, parts, encoded)

    def reduce_piece(
        self, low: int, high: int, contributors: Sequence[int], weights: list[float], exact: torch.Tensor,
        encoded: bytearray | memoryview,
    ) -> None:  # fmt: skip
        """Combine the values ``[low, high)`` into ``exact``, and encode them into their place in ``encoded``.

        ``low`` and ``high`` must be multiples of `chunk_values` or the share's end. Then cuts do not change the result.
        """
        self.combine(low, high, contributors, weights, exact)
        first_byte, last_byte = self._codec.encoded_bytes(low), self._codec.encoded_bytes(high)
        self._codec.part(low, high).encode_into(exact, memoryview(encoded)[first_byte:last_byte])

    def combine(
        self, low: int, high: int, contributors: Sequence[int], weights: list[float], exact: torch.Tensor
    ) -> None:
        """Combine the values ``[low, high)`` into ``exact``; see `reduce_piece`."""
        rule = get_rule(self._spec)
        if isinstance(rule, VotingRule):
            step = STACK_VALUES if rule.by_coordinate else self._chunk
            for first, last in cut(high - low, self._block_size(), step):
                stack = [self._decoded(index, low + first, low + last) for index in contributors]
                exact[first:last] = rule.combine(self._spec, stack)
        else:
            self._add_up(low, high, contributors, weights, exact)

    def spans(self) -> list[tuple[int, int]]:
        """Return (start, stop) of each piece in which the share is reduced."""
        return cut(len(self._own), self._block_size())

    def _block_size(self) -> int:
        """Return the smallest length at whose multiples all codecs can be cut."""
        return math.lcm(self._codec.block_size, *(codec.block_size for codec, _ in self.parts.values()))

    def _add_up(
        self, low: int, high: int, contributors: Sequence[int], weights: list[float], exact: torch.Tensor
    ) -> None:
        """Write the weighted sum to ``exact``: an unencoded own part first, the others in roster order."""
        import torch

        weight_of = dict(zip(contributors, weights, strict=True))
        if self._own_index in weight_of and self._own_index not in self.parts:
            torch.mul(self._own[low:high], weight_of.pop(self._own_index), out=exact)
        else:
            exact.zero_()
        for index, weight in weight_of.items():
            codec, piece = self._encoded(index, low, high)
            codec.accumulate_into(piece, weight, exact)

    def _decoded(self, index: int, low: int, high: int) -> torch.Tensor:
        import torch

        if index == self._own_index and index not in self.parts:
            return self._own[low:high].clone()
        values = torch.empty(high - low, dtype=torch.float32)
        codec, piece = self._encoded(index, low, high)
        codec.decode_into(piece, values)
        return values

    def _encoded(self, index: int, low: int, high: int) -> tuple[Codec, memoryview]:
        codec, part = self.parts[index]
        return codec.part(low, high), memoryview(part)[codec.encoded_bytes(low) : codec.encoded_bytes(high)]


class ExactMean:
    """The mean of a share before encoding, recomputed on iteration, because the encoded parts take less memory."""

    def __init__(self, share: OwnShare, contributors: Sequence[int], weights: list[float]) -> None:
        """
        Args:
            share: The reduced share; may release its parts later. Its own values must not change.
        """
        self._share = copy.copy(share)
        self._share.parts = dict(share.parts)
        self._contributors = contributors
        self._weights = weights

    def __iter__(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield (start, stop, values) of each piece, fp32; the next piece overwrites the values."""
        import torch

        spans = self._share.spans()
        exact = torch.empty(spans[0][1], dtype=torch.float32)
        for low, high in spans:
            piece = exact[: high - low]
            self._share.combine(low, high, self._contributors, self._weights, piece)
            yield low, high, piece
