"""Shares in transit and at their owner, piece by piece: encode and send, receive and check, choose and reduce.

1. `send_encoded` encodes each piece of a part while it sends the one before. On the wire a share is one bulk buffer,
   whose bytes do not depend on the cuts into pieces (`p2ptrain.codecs.base.Codec`).
2. `receive_checked` checks each piece while the next arrives.
3. `OwnShare.judge` drops outliers when the owner closes its mask, before the group agrees on the contributors.
4. `OwnShare.reduce` combines the rest by the manifest's rule (`p2ptrain.averaging.vector.rules`). Each piece of the
   result is sent (`EncodedStream`) while the next is computed.
"""

from __future__ import annotations

import asyncio
import copy
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from p2ptrain.averaging.vector.chunks import Node, PartCheck, SumTree, check_range, chunk_values, cut
from p2ptrain.averaging.vector.rules import (
    MIN_FOR_MEDIAN,
    Claim,
    VotingRule,
    WeightedRule,
    get_rule,
    out_of_proportion,
)
from p2ptrain.buffers import Buffer
from p2ptrain.codecs import Codec, CodecError, Decoder, PartList, get_codec
from p2ptrain.errors import ProtocolError
from p2ptrain.hashing import EMPTY_HASH
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.runtime import Runtime
from p2ptrain.tasks import Tasks

if TYPE_CHECKING:
    import torch

PieceCheck = Callable[[memoryview, int, int], None]
"""Called with (encoded piece, start, stop), offsets in values of the share; raises `CodecError` to refuse the piece."""


class EncodedStream:
    """Encoded share that can be sent to any number of peers while it is still being produced.

    Attributes:
        data: The encoded share; complete after `grow` with its length.
    """

    def __init__(self, data: bytearray | memoryview) -> None:
        self.data = data
        self._ready = 0
        self._grew = asyncio.Event()

    def grow(self, ready: int) -> None:
        """Release the first ``ready`` bytes to senders; those bytes must not change afterwards."""
        self._ready = ready
        self._grew.set()
        self._grew = asyncio.Event()

    async def send(self, channel: Channel) -> None:
        """Send the whole share as one buffer, as its bytes become ready; see `Channel.send_bytes`."""
        view, sent = memoryview(self.data), 0
        while sent < len(view):
            while self._ready == sent:
                await self._grew.wait()
            ready = self._ready
            await channel.send_bytes(view[sent:ready], more=ready < len(view))
            sent = ready


async def send_encoded(
    channel: Channel, runtime: Runtime, codec: Codec, vector: torch.Tensor, check: PieceCheck
) -> memoryview:
    """Encode and send a part, one piece ahead of the network; return it, or the codec's `encoded_view` of the vector.

    Raises:
        CodecError: A value cannot be encoded, or ``check`` refuses it.
        PeerError, DeadlineError: See `Channel.send_bytes`.
    """
    view = codec.encoded_view(vector)
    encoded = runtime.buffers.lend(codec.encoded_bytes(len(vector))) if view is None else view

    async def encode(low: int, high: int) -> memoryview:
        piece = encoded[codec.encoded_bytes(low) : codec.encoded_bytes(high)]
        await runtime.process(len(piece), encode_piece, low, high, piece)
        return piece

    def encode_piece(low: int, high: int, piece: memoryview) -> None:
        if view is None:
            codec.part(low, high).encode_into(vector[low:high], piece)
        check(piece, low, high)

    first, *others = cut(len(vector), codec.block_size)
    async with Tasks() as tasks:
        ahead = tasks.call(encode(*first), "encode")
        for span in [*others, None]:
            piece = await ahead
            if span is not None:
                ahead = tasks.call(encode(*span), "encode")
            await channel.send_bytes(piece, more=span is not None)
    return encoded


async def receive_checked(
    channel: Channel,
    runtime: Runtime,
    codec: Decoder,
    num_values: int,
    timeout_seconds: float,
    check: PieceCheck,
    on_progress: Callable[[int], None] = lambda filled: None,
) -> memoryview:
    """Receive and return an encoded share, and check it while it arrives, piece by piece in order.

    Args:
        on_progress: Called with the number of bytes received so far.

    Raises:
        ProtocolError: The share has the wrong length, or ``check`` refuses a value.
        PeerError, DeadlineError: See `Channel.receive_bytes`.
    """
    data = runtime.buffers.lend(codec.encoded_bytes(num_values))
    arriving = _Arriving(runtime, codec, num_values, data, check)

    def progress(filled: int) -> None:
        on_progress(filled)
        arriving.on_progress(filled)

    try:
        await channel.receive_bytes(len(data), timeout_seconds, data, on_progress=progress)
        await arriving.finish()
        return data
    except CodecError as error:
        raise ProtocolError(channel.remote, f"sent values that are refused: {error}") from error
    finally:
        await arriving.close()


class _Arriving:
    """Checks complete pieces of a receive buffer, those of a large one in a pool thread; one call at a time."""

    def __init__(self, runtime: Runtime, codec: Decoder, num_values: int, data: memoryview, check: PieceCheck) -> None:
        self._data = data
        self._runtime = runtime
        self._codec = codec
        self._check_piece = check
        self._left = cut(num_values, codec.block_size)
        self._tasks = Tasks()
        self._checking: asyncio.Task[None] | None = None

    def on_progress(self, filled: int) -> None:
        """Start a check of all complete pieces unless one is still running."""
        if self._checking is not None and not self._checking.done():
            return
        complete = [span for span in self._left if self._codec.encoded_bytes(span[1]) <= filled]
        if complete and (self._checking is None or self._checking.exception() is None):
            del self._left[: len(complete)]
            self._checking = self._tasks.call(self._runtime.process(filled, self._check, complete), "check")

    async def finish(self) -> None:
        if self._checking is not None:
            await self._checking
        await self._runtime.process(len(self._data), self._check, self._left)

    async def close(self) -> None:
        """Cancel the running check, and raise its error if it is no `CodecError`."""
        await self._tasks.close()
        if self._checking is not None and not self._checking.cancelled():
            error = self._checking.exception()
            if error is not None and not isinstance(error, CodecError):
                raise error

    def _check(self, spans: list[tuple[int, int]]) -> None:
        for low, high in spans:
            piece = self._data[self._codec.encoded_bytes(low) : self._codec.encoded_bytes(high)]
            self._check_piece(piece, low, high)


STACK_VALUES = 1 << 15
"""Values of each part that a rule by coordinate combines at a time; the stack of parts must fit a core's cache."""


def part_weights(spec: AveragingSpec, norms: Sequence[float], claims: Sequence[Claim]) -> list[float]:
    """Return the weight of each contributor's part under the manifest's rule."""
    rule = get_rule(spec)
    return rule.weights(spec, norms, claims) if isinstance(rule, WeightedRule) else rule.shares(spec, claims)


class OwnShare:
    """One owner's share in one attempt.

    Attributes:
        own: The owner's own part, fp32, ``[num_values]``; not changed.
        parts: By member: codec and bytes of its complete, valid part. `reduce` adds the owner's if it is encoded.
        refused: By member, owner included: the reason why `judge` left it out.
        trees: By member, owner included: the tree over its part's chunks.
        own_part: The owner's own part, encoded by `measure_own`; None if it counts unencoded.
        kept: Another contributor, its codec and its part, for an audit (`p2ptrain.training.worth`); None without one.
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
            own_codec: Codec that the owner's own part passes through before it counts; None if it counts unencoded.
                Set it for a sparse codec, where an unencoded part would have a larger norm than the others'.
            lists_parts: True if the result is a `PartList` of parts in ``own_codec``.
            chunk: `chunk_values` of the whole vector's codec; 0 if ``codec`` is that codec.
            audited: True if members audit the result: then parts are hashed, and kept after `reduce`.
        """
        self._codec = codec
        self._own_codec = own_codec
        self._lists_parts = lists_parts
        self._spec = spec
        self.own = own
        self._own_index = own_index
        self._audited = audited
        self._chunk = chunk or chunk_values(codec)
        self._is_measured = num_members >= MIN_FOR_MEDIAN
        self.trees: dict[int, SumTree] = {}
        self.parts: dict[int, tuple[Codec, Buffer]] = {}
        self.refused: dict[int, str] = {}
        self.own_part: Buffer | None = None
        self.kept: tuple[int, Codec, Buffer] | None = None

    def new_check(self, codec: Codec) -> PartCheck:
        return PartCheck(codec, self._spec, self._chunk, measured=self._is_measured, hashed=self._audited)

    def measure_own(self) -> None:
        """Check and measure the owner's own part, and encode it if it has a codec.

        Raises:
            CodecError: A value is not finite or beyond ``max_value``, or cannot be encoded.
        """
        leaves: list[Node] = []
        if (codec := self._own_codec) is not None:
            self.own_part, check = codec.encode(self.own), self.new_check(codec)
            for low, high in cut(len(self.own), codec.block_size):
                check(memoryview(self.own_part)[codec.encoded_bytes(low) : codec.encoded_bytes(high)], low, high)
            leaves = check.leaves
        for low, high in cut(len(self.own), self._codec.block_size) if codec is None else ():
            piece = self.own[low:high]
            least, greatest = (float(extreme) for extreme in piece.aminmax())  # a NaN makes both NaN
            check_range(max(-least, greatest), self._spec.max_value)
            energies = [0.0] * len(cut(high - low, self._chunk, self._chunk))
            if self._is_measured:
                plain = piece.detach().numpy().data.cast("B")
                energies = get_codec("fp32").squared_norms(plain, high - low, self._chunk)
            leaves += [(EMPTY_HASH, energy) for energy in energies]
        self.trees[self._own_index] = SumTree(leaves or [(EMPTY_HASH, 0.0)])

    def add(self, index: int, part: Buffer, check: PartCheck, tree: SumTree | None = None) -> None:
        """Add another member's part, with its passed check and, if known, the tree over its leaves."""
        self.parts[index] = check.codec, part
        self.trees[index] = tree or SumTree(check.leaves or [(EMPTY_HASH, 0.0)])

    def judge(self, trust: Sequence[int]) -> frozenset[int]:
        """Refuse the parts that are `out_of_proportion`; return the owner's mask, the members that remain.

        ``trust`` is that of all members, in roster order.
        """
        for index, multiple in out_of_proportion(self.norms(), trust, self._spec.max_norm_ratio).items():
            self.refused[index] = f"sent a part whose norm is {multiple:.3g} times the group's median"
            self.parts.pop(index, None)
        return frozenset(self.trees.keys() - self.refused.keys())

    def norms(self) -> dict[int, float]:
        """Return the Euclidean norm of each member's part; zeros in a group of one or two."""
        return {index: math.sqrt(tree.root[1]) for index, tree in self.trees.items()}

    async def reduce(
        self, runtime: Runtime, contributors: Sequence[int], claims: Sequence[Claim], mean: EncodedStream
    ) -> ExactMean | None:
        """Combine the contributors' parts, and encode the result into ``mean``, piece by piece.

        Releases the parts afterwards unless the share is audited. ``contributors`` ascend; each has a part here.

        Returns:
            The result before encoding; None if the encoding is lossless.

        Raises:
            CodecError: The result cannot be encoded.
        """
        import torch

        weights = self.weights(contributors, claims)
        self.kept = self._keep([index for index in weights if index != self._own_index])
        if self.own_part is not None and self._own_codec is not None:
            self.parts[self._own_index] = self._own_codec, self.own_part
        if self._lists_parts:
            await runtime.offload(self._list_parts, weights, mean.data)
            mean.grow(len(mean.data))
            self.parts.clear()
            return None
        spans, num_parts = self.spans(), len(self.parts) + 1
        exact = torch.empty(spans[0][1], dtype=torch.float32)  # one piece, to fit a core's cache
        for low, high in spans:
            out = exact[: high - low]
            await runtime.process(num_parts * out.nbytes, self.reduce_piece, low, high, weights, out, mean.data)
            mean.grow(self._codec.encoded_bytes(high))
        found = ExactMean(self, weights) if self._codec.lossy else None
        if not self._audited:
            self.parts.clear()
        return found

    def _keep(self, others: Sequence[int]) -> tuple[int, Codec, Buffer] | None:
        """Draw one of the parts: all have arrived, so nobody could know whose update is audited."""
        if not others or not len(self.own):
            return None
        index = secrets.choice(others)
        return index, *self.parts[index]

    def weights(self, contributors: Sequence[int], claims: Sequence[Claim]) -> dict[int, float]:
        """Return the `part_weights` by contributor, in roster order."""
        norms = self.norms()
        weights = part_weights(self._spec, [norms[index] for index in contributors], claims)
        return dict(zip(contributors, weights, strict=True))

    def _list_parts(self, weights: Mapping[int, float], encoded: bytearray | memoryview) -> None:
        assert self._own_codec is not None
        parts = [self.parts[index][1] for index in weights]
        PartList(self._own_codec, len(parts)).write(list(weights.values()), parts, encoded)

    def reduce_piece(
        self, low: int, high: int, weights: Mapping[int, float], exact: torch.Tensor, encoded: bytearray | memoryview
    ) -> None:
        """Combine the values ``[low, high)`` into ``exact``, and encode them into their place in ``encoded``.

        ``low`` and ``high`` must be multiples of `chunk_values` or the share's end. Then cuts do not change the result.
        """
        self.combine(low, high, weights, exact)
        first_byte, last_byte = self._codec.encoded_bytes(low), self._codec.encoded_bytes(high)
        self._codec.part(low, high).encode_into(exact, memoryview(encoded)[first_byte:last_byte])

    def combine(self, low: int, high: int, weights: Mapping[int, float], exact: torch.Tensor) -> None:
        """Combine the values ``[low, high)`` into ``exact``: a sum takes an unencoded own part first."""
        import torch

        rule = get_rule(self._spec)
        if isinstance(rule, VotingRule):
            step = STACK_VALUES if rule.by_coordinate else self._chunk
            for first, last in cut(high - low, self._block_size(), step):
                stack = [self._decoded(index, low + first, low + last) for index in weights]
                exact[first:last] = rule.combine(self._spec, stack)
            return
        left = dict(weights)
        if self._own_index in left and self._own_index not in self.parts:
            torch.mul(self.own[low:high], left.pop(self._own_index), out=exact)
        else:
            exact.zero_()
        for index, weight in left.items():
            codec, piece = self._encoded(index, low, high)
            codec.accumulate_into(piece, weight, exact)

    def spans(self) -> list[tuple[int, int]]:
        """Return (start, stop) of each piece in which the share is reduced."""
        return cut(len(self.own), self._block_size())

    def _block_size(self) -> int:
        """Return the smallest length at whose multiples all codecs can be cut."""
        return math.lcm(self._codec.block_size, *(codec.block_size for codec, _ in self.parts.values()))

    def _decoded(self, index: int, low: int, high: int) -> torch.Tensor:
        import torch

        if index == self._own_index and index not in self.parts:
            return self.own[low:high].clone()
        values = torch.empty(high - low, dtype=torch.float32)
        codec, piece = self._encoded(index, low, high)
        codec.decode_into(piece, values)
        return values

    def _encoded(self, index: int, low: int, high: int) -> tuple[Codec, memoryview]:
        codec, part = self.parts[index]
        return codec.part(low, high), memoryview(part)[codec.encoded_bytes(low) : codec.encoded_bytes(high)]


class ExactMean:
    """The mean of a share before encoding, recomputed on iteration, because the encoded parts take less memory."""

    def __init__(self, share: OwnShare, weights: Mapping[int, float]) -> None:
        """``share`` may release its parts later; its own values must not change."""
        self._share = copy.copy(share)
        self._share.parts = dict(share.parts)
        self._weights = weights

    def __iter__(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield (start, stop, values) of each piece, fp32; the next piece overwrites the values."""
        import torch

        spans = self._share.spans()
        exact = torch.empty(spans[0][1], dtype=torch.float32)
        for low, high in spans:
            piece = exact[: high - low]
            self._share.combine(low, high, self._weights, piece)
            yield low, high, piece
