"""The owner's side of a share: which contributions count, and what they make together.

Parts are checked and measured while they arrive (`PartCheck`). When the owner closes its mask, it leaves out the parts
that are out of all proportion (`OwnShare.judge`): later would be too late, because the contributors are agreed on by
then. The rest is combined by the manifest's rule (`p2ptrain.averaging.vector.rules`), piece by piece, and each
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
"""Values of all contributors that a rule by coordinate works on at a time, so that they stay in a core's cache."""

RANGE_SLACK = 1.01
"""Encoded values may exceed ``max_value`` by this factor, because a codec may round up."""


CHUNK_VALUES = 1 << 14
"""Values that are hashed, committed to, and checked together, unless a codec's block is longer. Members must agree on
it: distances of ``centered_clip`` are taken in such chunks. Shorter ones cost more to hash, longer ones to show."""


def chunk_values(codec: Codec) -> int:
    """Values in a chunk: the unit of hashes, commitments and spot checks (`p2ptrain.averaging.verification.audit`).

    Chunk k of every part and of their mean holds the same values, whatever they are encoded in, and that of the mean
    follows from those of the parts: no block of a codec, and nothing that a rule works on as a whole, lies across two.
    """
    return math.lcm(CHUNK_VALUES, codec.block_size)


def num_chunks(num_values: int, chunk: int) -> int:
    """Chunks of a share of so many values."""
    return -(-num_values // chunk)


def chunk_span(low: int, high: int, number: int, chunk: int) -> tuple[int, int]:
    """First value of a chunk of the share ``[low, high)``, and the value after its last."""
    first = low + number * chunk
    return first, min(first + chunk, high)


def mean_root(codec: Decoder, mean: Buffer, num_values: int, chunk: int) -> bytes:
    """Return an encoded mean's name: the root of its `mean_tree`, or the hash of a list of parts."""
    return bulk_hash(mean) if isinstance(codec, PartList) else mean_tree(codec, mean, num_values, chunk).root[0]


def mean_tree(codec: Decoder, mean: Buffer, num_values: int, chunk: int) -> SumTree:
    """The tree over the chunks of an encoded mean, whose root names it; all energies are zero.

    Args:
        codec: Of the share.
        mean: At least one value.
        num_values: How many.
        chunk: `chunk_values` of the whole vector's codec.
    """
    ends = [codec.encoded_bytes(high) for _, high in cut(num_values, chunk, chunk)]
    return SumTree([(leaf, 0.0) for leaf in leaf_hashes(mean, ends)])


class RangeCheck:
    """Refuses pieces of an encoded share that are malformed or hold values beyond the manifest's ``max_value``.

    Attributes:
        codec: How the share is encoded.
    """

    def __init__(self, codec: Decoder, spec: AveragingSpec) -> None:
        self.codec = codec
        self._max_value = spec.max_value

    def __call__(self, piece: memoryview, low: int, high: int) -> None:
        """Check the values ``[low, high)`` of the share.

        Raises:
            CodecError: They are refused.
        """
        codec = self.codec.part(low, high)
        codec.validate(piece, high - low)
        check_range(codec.largest(piece, high - low), self._max_value * RANGE_SLACK)


class PartCheck(RangeCheck):
    """A `RangeCheck` that also measures and hashes, chunk by chunk, a share whose pieces come in order.

    Attributes:
        leaves: Of the chunks so far: hash and energy, the former only if ``hashed``, the latter if ``measured``.
    """

    codec: Codec

    def __init__(self, codec: Codec, spec: AveragingSpec, chunk: int, *, measured: bool, hashed: bool) -> None:
        """
        Args:
            codec: How the share is encoded.
            spec: The limits.
            chunk: See `chunk_values`.
            measured: Whether energies are needed.
            hashed: Whether hashes are.
        """
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
    """Raise `CodecError` unless the largest magnitude is a number within the limit."""
    if not largest <= limit:
        raise CodecError(f"a value of magnitude {largest:.3g} is beyond the manifest's averaging.max_value")


def part_weights(spec: AveragingSpec, norms: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """Return the factor of each contributor's part, by the manifest's rule."""
    rule = get_rule(spec)
    return rule.weights(spec, norms, tokens) if isinstance(rule, WeightedRule) else rule.shares(spec, tokens)


class OwnShare:
    """One owner's share in one attempt.

    Attributes:
        parts: By member: the codec and bytes of its part, complete and valid; the owner's own is not among them.
        refused: By member, the owner itself included: why `judge` left it out.
        trees: By member, the owner itself included: what `PartCheck` found in its part.
        is_measured: Whether norms are taken.
        own_part: The owner's own part, encoded, once `measure_own` is done; None if it counts as it is.
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
            codec: How the result is encoded, unless it is the list of the parts.
            spec: The rule and the limits.
            own: The owner's own part, fp32, ``[num_values]``; not changed.
            own_index: Its place in the roster.
            num_members: Size of the roster.
            own_codec: How the owner's own part is encoded before it counts, like all others; None if it counts as it
                is. It should be encoded if the codec is sparse: beside what is left of the others' it would be long.
            lists_parts: Whether the result is a `PartList`, of parts in ``own_codec``.
            chunk: `chunk_values` of the whole vector's codec; 0 if ``codec`` is that.
            audited: Whether members check slices of the result: then parts are hashed, and kept after it is made.

        Raises:
            ValueError: Such a list is asked for without ``own_codec``.
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
        """A check for one part that will arrive in this codec."""
        return PartCheck(codec, self._spec, self._chunk, measured=self.is_measured, hashed=self._audited)

    def measure_own(self) -> None:
        """Check and measure the owner's own part, encoded if it is to be; in a pool thread.

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
            least, greatest = (float(extreme) for extreme in piece.aminmax())  # NaN, if there is one, is both
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
        """Take in another member's part, with the check that it passed, and the tree over its leaves, if known."""
        self.parts[index] = check.codec, part
        self.trees[index] = tree or SumTree(check.leaves or [(EMPTY_HASH, 0.0)])

    def judge(self) -> frozenset[int]:
        """Refuse the parts that are out of proportion; returns who is left: the owner's mask."""
        for index, multiple in out_of_proportion(self.norms(), self._spec.max_norm_ratio).items():
            self.refused[index] = f"sent a part whose norm is {multiple:.3g} times the group's median"
            self.parts.pop(index, None)
        return frozenset(self.trees.keys() - self.refused.keys())

    def forget(self) -> None:
        """Let go of all parts: nobody will ask for slices any more."""
        self.parts.clear()

    def norms(self) -> dict[int, float]:
        """By member: the Euclidean norm of its part; zeros in a group of one or two."""
        return {index: math.sqrt(tree.root[1]) for index, tree in self.trees.items()}

    async def reduce(
        self, runtime: Runtime, contributors: Sequence[int], tokens: Sequence[int], mean: EncodedStream
    ) -> ExactMean | None:
        """Combine the contributors' parts and encode the result, piece by piece.

        Unless members check slices of it, the parts are then forgotten here.

        Args:
            runtime: Where to compute.
            contributors: Indices into the roster, ascending; each has a part here.
            tokens: Of each contributor.
            mean: Grows with each piece.

        Returns:
            The result before encoding; None when encoding lost nothing.

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
        exact = torch.empty(spans[0][1], dtype=torch.float32)  # of one piece, so that it stays in a core's cache
        for low, high in spans:
            await runtime.offload(self.reduce_piece, low, high, contributors, weights, exact[: high - low], mean.data)
            mean.grow(self._codec.encoded_bytes(high))
        found = ExactMean(self, contributors, weights) if self._codec.lossy else None
        if not self._audited:
            self.parts.clear()
        return found

    def weights(self, contributors: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Return the factor of each contributor's part."""
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
        """Combine the values ``[low, high)`` into ``exact``, and encode them to their place.

        Both are multiples of `chunk_values` or the share's end: then the result does not depend on where it is cut.
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
        """First value and value after the last of the pieces in which the share is reduced."""
        return cut(len(self._own), self._block_size())

    def _block_size(self) -> int:
        """The smallest number of values at whose multiples all codecs can be cut."""
        return math.lcm(self._codec.block_size, *(codec.block_size for codec, _ in self.parts.values()))

    def _add_up(
        self, low: int, high: int, contributors: Sequence[int], weights: list[float], exact: torch.Tensor
    ) -> None:
        """The weighted sum, in the order of the roster; but the owner's part first where it is not encoded."""
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
    """The mean of a share before it was encoded, computed again when it is asked for.

    The parts take less memory than it does, and in most uses nobody asks before the round is over.
    """

    def __init__(self, share: OwnShare, contributors: Sequence[int], weights: list[float]) -> None:
        """
        Args:
            share: As it was reduced; may forget its parts. Its own values must not change.
            contributors: As in `OwnShare.reduce`.
            weights: As from `OwnShare.weights`.
        """
        self._share = copy.copy(share)
        self._share.parts = dict(share.parts)
        self._contributors = contributors
        self._weights = weights

    def __iter__(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """First value, value after the last, and the values between, fp32; overwritten by the next ones."""
        import torch

        spans = self._share.spans()
        exact = torch.empty(spans[0][1], dtype=torch.float32)
        for low, high in spans:
            piece = exact[: high - low]
            self._share.combine(low, high, self._contributors, self._weights, piece)
            yield low, high, piece
