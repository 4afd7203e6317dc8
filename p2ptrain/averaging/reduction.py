"""The owner's side of a share: which contributions count, and what they make together.

Parts are checked and measured while they arrive (`PartCheck`). When the owner closes its mask, it leaves out the parts
that are out of all proportion (`OwnShare.judge`): later would be too late, because the contributors are agreed on by
then. The rest is combined by the manifest's rule (`p2ptrain.averaging.robust`), piece by piece, and each piece of the
result can be sent while the next is computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2ptrain.averaging.pieces import Growing, cut
from p2ptrain.averaging.robust import (
    MIN_FOR_MEDIAN,
    VOTING_RULES,
    clip_factors,
    combine,
    out_of_proportion,
    vote_weights,
)
from p2ptrain.codecs import Codec, CodecError, Decoder, PartList
from p2ptrain.manifest import AveragingSpec
from p2ptrain.runtime import Runtime

if TYPE_CHECKING:
    import torch

STACK_VALUES = 1 << 15
"""Values of all contributors that a rule by votes works on at a time, so that they stay in a core's cache. Members must
agree on it: distances of ``centered_clip`` are taken within such a chunk."""

RANGE_SLACK = 1.01
"""Encoded values may exceed ``max_value`` by this factor, because a codec may round up."""


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
    """A `RangeCheck` that also adds up the norm, over pieces that come in order.

    Attributes:
        squared_norm: Of the pieces so far; 0 without ``measured``.
    """

    codec: Codec

    def __init__(self, codec: Codec, spec: AveragingSpec, measured: bool) -> None:
        super().__init__(codec, spec)
        self._measured = measured
        self.squared_norm = 0.0

    def __call__(self, piece: memoryview, low: int, high: int) -> None:
        """See `RangeCheck`."""
        super().__call__(piece, low, high)
        if self._measured:
            self.squared_norm += self.codec.part(low, high).squared_norm(piece, high - low)

    @property
    def norm(self) -> float:
        """The Euclidean norm of the pieces so far."""
        return math.sqrt(self.squared_norm)


def check_range(largest: float, limit: float) -> None:
    """Raise `CodecError` unless the largest magnitude is a number within the limit."""
    if not largest <= limit:
        raise CodecError(f"a value of magnitude {largest:.3g} is beyond the manifest's averaging.max_value")


class OwnShare:
    """One owner's share in one attempt.

    Attributes:
        parts: By member: the codec and bytes of its part, complete and valid; the owner's own is not among them.
        refused: By member, the owner itself included: why `judge` left it out.
        own_part: The owner's own part, encoded, once `measure_own` is done; None if it counts as it is.
    """

    def __init__(
        self, codec: Codec, spec: AveragingSpec, own: torch.Tensor, own_index: int, num_members: int,
        own_codec: Codec | None = None, lists_parts: bool = False,
    ) -> None:  # fmt: skip
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
        self._is_measured = num_members >= MIN_FOR_MEDIAN
        self._norms: dict[int, float] = {}
        self.parts: dict[int, tuple[Codec, bytearray]] = {}
        self.refused: dict[int, str] = {}
        self.own_part: bytearray | None = None

    def new_check(self, codec: Codec) -> PartCheck:
        """A check for one part that will arrive in this codec."""
        return PartCheck(codec, self._spec, self._is_measured)

    def measure_own(self) -> None:
        """Check and measure the owner's own part, encoded if it is to be; for the compute thread.

        Raises:
            CodecError: A value is not finite or beyond ``max_value``, or cannot be encoded.
        """
        if self._own_codec is not None:
            self._encode_own(self._own_codec)
            return
        from p2ptrain.codecs.norms import sum_of_squares

        squared_norm = 0.0
        for low, high in cut(len(self._own), self._codec.block_size):
            piece = self._own[low:high]
            check_range(float(piece.abs().amax()), self._spec.max_value)
            squared_norm += sum_of_squares(piece) if self._is_measured else 0.0
        self._norms[self._own_index] = math.sqrt(squared_norm)

    def _encode_own(self, codec: Codec) -> None:
        part, check = codec.encode(self._own), self.new_check(codec)
        for low, high in cut(len(self._own), codec.block_size):
            check(memoryview(part)[codec.encoded_bytes(low) : codec.encoded_bytes(high)], low, high)
        self.own_part = part
        self._norms[self._own_index] = check.norm

    def add(self, index: int, part: bytearray, check: PartCheck) -> None:
        """Take in another member's part, with the check that all of it passed."""
        self.parts[index] = check.codec, part
        self._norms[index] = check.norm

    def judge(self) -> frozenset[int]:
        """Refuse the parts that are out of proportion; returns who is left: the owner's mask."""
        for index, multiple in out_of_proportion(self._norms, self._spec.max_norm_ratio).items():
            self.refused[index] = f"sent a part whose norm is {multiple:.3g} times the group's median"
            self.parts.pop(index, None)
        return frozenset(self._norms.keys() - self.refused.keys())

    async def reduce(
        self, runtime: Runtime, contributors: Sequence[int], tokens: Sequence[int], mean: Growing
    ) -> torch.Tensor | None:
        """Combine the contributors' parts and encode the result, piece by piece; the parts are then forgotten.

        Args:
            runtime: Where to compute.
            contributors: Indices into the roster, ascending; each has a part here.
            tokens: Of each contributor.
            mean: Grows with each piece.

        Returns:
            The result before encoding, fp32, ``[num_values]``; None when it is a list of parts, which loses nothing.

        Raises:
            CodecError: The result cannot be encoded.
        """
        import torch

        weights = self.weights(contributors, tokens)
        if self.own_part is not None and self._own_codec is not None:
            self.parts[self._own_index] = self._own_codec, self.own_part
        if self._lists_parts:
            await runtime.compute(self._list_parts, contributors, weights, mean.data)
            mean.grow(len(mean.data))
            self.parts.clear()
            return None
        exact = torch.empty(len(self._own), dtype=torch.float32)
        for low, high in cut(len(self._own), self._block_size()):
            await runtime.compute(self._reduce_piece, low, high, contributors, weights, exact[low:high], mean.data)
            mean.grow(self._codec.encoded_bytes(high))
        self.parts.clear()
        return exact

    def weights(self, contributors: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """What each contributor's part is multiplied by; under ``norm_clip`` they add up to less where it clips."""
        weights = vote_weights(self._spec, tokens)
        if self._spec.aggregation == "norm_clip":
            factors = clip_factors(self._spec, [self._norms[index] for index in contributors], tokens)
            weights = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
        return weights

    def _list_parts(self, contributors: Sequence[int], weights: list[float], encoded: bytearray) -> None:
        assert self._own_codec is not None
        parts = [self.parts[index][1] for index in contributors]
        PartList(self._own_codec, len(parts)).write(weights, parts, encoded)

    def _reduce_piece(
        self, low: int, high: int, contributors: Sequence[int], weights: list[float], exact: torch.Tensor,
        encoded: bytearray,
    ) -> None:  # fmt: skip
        """Combine the values ``[low, high)`` into ``exact``, and encode them to their place."""
        if self._spec.aggregation in VOTING_RULES:
            for first, last in cut(high - low, self._block_size(), STACK_VALUES):
                stack = [self._decoded(index, low + first, low + last) for index in contributors]
                exact[first:last] = combine(self._spec, stack)
        else:
            self._add_up(low, high, contributors, weights, exact)
        first_byte, last_byte = self._codec.encoded_bytes(low), self._codec.encoded_bytes(high)
        self._codec.part(low, high).encode_into(exact, memoryview(encoded)[first_byte:last_byte])

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
