"""The arithmetic of a round in one process: all members' parts, all owners' means, without messages and votes.

It gives the bits of `p2ptrain.averaging.averager` where all members are reachable, equally fast, in time and trusted.
`p2ptrain.training.simulation` runs it. It holds one encoded vector for each member.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch

from p2ptrain.averaging.allreduce.bandwidth import share_weights, split_shares
from p2ptrain.averaging.commit.attempt import lists_parts, mean_codec
from p2ptrain.averaging.grouping.cells import Cells, Key, delegate_order
from p2ptrain.averaging.protocol.table import FULL_TRUST, SLEEP_ROUNDS, draw, stands
from p2ptrain.averaging.vector.chunks import RangeCheck, chunk_values, cut
from p2ptrain.averaging.vector.error_feedback import Encoded, feedback_scale
from p2ptrain.averaging.vector.reduce import EncodedStream, OwnShare
from p2ptrain.averaging.vector.rules import Claim, VotingRule, get_rule
from p2ptrain.buffers import Buffer
from p2ptrain.codecs import Codec, Decoder, codec_at, dense_codec
from p2ptrain.manifest import AveragingSpec
from p2ptrain.runtime import Runtime

Exact = Iterable[tuple[int, int, torch.Tensor]]
"""A share's mean before encoding; see `Encoded.own_mean_exact`."""


@dataclass(frozen=True)
class Update:
    """A member's contribution.

    Attributes:
        vector: fp32, ``[num_values]``; must not change during the round.
        tokens: Its weight, at least 1.
    """

    peer: str
    vector: torch.Tensor
    tokens: int


@dataclass(frozen=True)
class RoundMean:
    """The result of a group or of a round.

    Attributes:
        vector: The decoded mean, fp32, ``[num_values]``.
        tokens: Those of the contributors.
        encoded: By contributor: its encoded vectors on each level, for `ErrorFeedback.update`.
        sent_bytes: By member: encoded values that it sent, without headers, votes and retries.
    """

    vector: torch.Tensor
    tokens: int
    encoded: Mapping[str, Sequence[Encoded]]
    sent_bytes: Mapping[str, int]


def draw_peers(
    there: Sequence[str], last: Mapping[str, int], share: float, least: int, round_: int, lineage: bytes
) -> list[str]:
    """Return the peers of a round, as a swarm of partial participation draws them.

    Args:
        there: The peers that can take part.
        last: By peer: its last round.
        share: Of the members that are drawn, at least ``least``.
    """
    if share == 1:
        return list(there)
    awake = frozenset(peer for peer, last_round in last.items() if round_ - last_round <= SLEEP_ROUNDS)
    drawn = draw(lineage, awake, share, least)
    undrawn = awake - drawn if stands(drawn, there, least) else frozenset()
    return [peer for peer in there if peer not in undrawn]


def draw_groups(
    peers: Sequence[str], group_size: int, round_: int, lineage: bytes, present: int = 0
) -> dict[Key, list[str]]:
    """Return the members of each group on the lowest level, as in a swarm that knows its size.

    ``present`` is that size, if more peers than these are there. A peer whose cell is full is in none: its work waits
    for the next round.
    """
    cells, groups = Cells(group_size), dict[Key, list[str]]()
    for peer in delegate_order(lineage, round_, 0, peers):
        group = groups.setdefault(cells.key_of(Key(round_, lineage, present or len(peers)), peer), [])
        if len(group) < group_size:
            group.append(peer)
    return groups


async def average_round(
    runtime: Runtime, spec: AveragingSpec, codec: Codec, groups: Mapping[Key, list[str]], updates: Mapping[str, Update]
) -> RoundMean:
    """Average in the groups of `draw_groups`, then up the tree, where a delegate speaks for its group.

    A delegate sends the last result to all of its group.

    Raises:
        CodecError: A contribution or a mean cannot be encoded.
    """
    results: dict[Key, RoundMean] = {}
    for key, peers in groups.items():
        results[key] = await average_group(runtime, spec, codec, [updates[peer] for peer in peers])
    sent = {peer: size for result in results.values() for peer, size in result.sent_bytes.items()}
    encoded = {peer: list(each) for result in results.values() for peer, each in result.encoded.items()}
    below = {peer: peer for peer in encoded}  # by contributor: the delegate that speaks for it
    cells, level = Cells(spec.group_size), 0
    while len(results) > 1:
        above: dict[Key, list[Update]] = {}
        for key, result in results.items():
            delegate = delegate_order(key.lineage, key.round, level, result.encoded)[0]
            below |= {peer: delegate for peer, speaker in below.items() if speaker in result.encoded}
            update = Update(delegate, result.vector, result.tokens)
            above.setdefault(cells.key_of(key, delegate, level + 1), []).append(update)
            sent[delegate] += _mean_bytes(spec, codec, update) * (len(result.sent_bytes) - 1)
        level += 1
        scales = {peer: each[-1].mean_scale for peer, each in encoded.items()}
        results = {
            key: await average_group(runtime, spec, codec_at(codec, level), members, scales)
            for key, members in above.items()
        }
        for result in results.values():
            for peer, size in result.sent_bytes.items():
                sent[peer] += size
            for peer, each in result.encoded.items():
                encoded[peer] += each
        counted = {peer for result in results.values() for peer in result.encoded}
        below = {peer: delegate for peer, delegate in below.items() if delegate in counted}
    (last,) = results.values()
    return RoundMean(last.vector, last.tokens, {peer: encoded[peer] for peer in below}, sent)


def _mean_bytes(spec: AveragingSpec, codec: Codec, update: Update) -> int:
    return dense_codec(codec).encoded_bytes(len(update.vector))


async def average_group(
    runtime: Runtime,
    spec: AveragingSpec,
    codec: Codec,
    updates: Sequence[Update],
    scales: Mapping[str, float] | None = None,
) -> RoundMean:
    """Average one group, in which all members own shares of equal size; ``scales`` are those of delegates' errors.

    Raises:
        CodecError: A contribution or a mean cannot be encoded.
    """
    updates = sorted(updates, key=lambda update: update.peer)
    count, num_values = len(updates), len(updates[0].vector)
    cuts = split_shares(num_values, share_weights([1.0] * count), codec.block_size)
    bounds = (0, *(high for _, high in cuts))
    members = [_Member(spec, codec, each.vector, span) for each, span in zip(updates, pairwise(bounds), strict=True)]
    shares = [_share(spec, codec, members, owner) for owner in range(count)]
    agreed = frozenset.intersection(*(share.judge([FULL_TRUST] * count) for share in shares if len(share.own)))
    contributors = sorted(agreed)
    claims = [Claim(updates[index].tokens) for index in contributors]
    vector = torch.empty(num_values, dtype=torch.float32)
    if codec.sparse or isinstance(get_rule(spec), VotingRule):
        decoder = mean_codec(spec, codec, num_values, count, len(contributors))
        means, exact = await _share_by_share(runtime, decoder, shares, bounds, contributors, claims, vector)
    else:
        means, exact = _at_once(codec, members, shares, bounds, contributors, claims, vector)
    encoded, sent = {}, {}
    for index, update in enumerate(updates):
        parts = members[index].parts
        others = sum(len(part) for owner, part in parts.items() if owner != index)
        sent[update.peer] = others + (count - 1) * len(means[index])
        if index not in agreed:
            continue
        scale = (scales or {}).get(update.peer, 1.0)
        encoded[update.peer] = [
            Encoded(
                vector=update.vector, bounds=bounds, sent_parts=parts, part_codec=codec, part_scale=scale,
                own_index=index, own_mean_exact=exact[index], own_mean=means[index], mean_codec=dense_codec(codec),
                mean_scale=scale * feedback_scale(spec, claims, contributors.index(index)),
            )
        ]  # fmt: skip
    return RoundMean(vector, sum(claim.tokens for claim in claims), encoded, sent)


class _Member:
    """A member's update, encoded once for all other owners: up to its own share, and from its end on.

    Attributes:
        own: Bounds of its own share.
        parts: By owner: the encoded part.
    """

    def __init__(self, spec: AveragingSpec, codec: Codec, vector: torch.Tensor, own: tuple[int, int]) -> None:
        self.vector, self.own = vector, own
        self.parts: dict[int, Buffer] = {}
        self._runs: list[tuple[int, Codec, memoryview]] = []
        for low, high in ((0, own[0]), (own[1], len(vector))):
            part, values = codec.part(low, high), vector[low:high]
            view = part.encoded_view(values)
            data, check = memoryview(part.encode(values)) if view is None else view, RangeCheck(part, spec)
            for first, last in cut(high - low, part.block_size):
                check(data[part.encoded_bytes(first) : part.encoded_bytes(last)], first, last)
            self._runs.append((low, part, data))

    def part(self, low: int, high: int) -> memoryview:
        """Return the encoded values of another owner's share, or of neighbouring ones."""
        start, codec, data = self._runs[low >= self.own[1]]
        return data[codec.encoded_bytes(low - start) : codec.encoded_bytes(high - start)]

    def add_to(self, sums: torch.Tensor, low: int, high: int, weight: float) -> None:
        """Add the `part`, times its weight, to the sums of the whole vector."""
        start, codec, _ = self._runs[low >= self.own[1]]
        codec.part(low - start, high - start).accumulate_into(self.part(low, high), weight, sums[low:high])


def _share(spec: AveragingSpec, codec: Codec, members: Sequence[_Member], owner: int) -> OwnShare:
    """Return an owner's share with all members' parts, which are added to the members, too."""
    (low, high), own = members[owner].own, members[owner].vector
    part = codec.part(low, high)
    share = OwnShare(
        dense_codec(codec).part(low, high), spec, own[low:high], owner, len(members), part if codec.sparse else None,
        lists_parts(spec, codec, len(own), len(members)), chunk=chunk_values(codec),
    )  # fmt: skip
    if high == low:
        return share
    share.measure_own()
    if share.own_part is not None:
        members[owner].parts[owner] = share.own_part
    for index, member in enumerate(members):
        if index == owner:
            continue
        data, check = member.part(low, high), share.new_check(part)
        for first, last in cut(high - low, part.block_size):
            check.measure(data[part.encoded_bytes(first) : part.encoded_bytes(last)], first, last)
        share.add(index, data, check)
        member.parts[owner] = data
    return share


async def _share_by_share(
    runtime: Runtime, decoder: Decoder, shares: Sequence[OwnShare], bounds: Sequence[int],
    contributors: Sequence[int], claims: Sequence[Claim], vector: torch.Tensor,
) -> tuple[list[Buffer], list[Exact | None]]:  # fmt: skip
    """Return each share's encoded and exact mean, as its owner computes them; decode the means into ``vector``."""
    means, exact = list[Buffer](), list[Exact | None]()
    for share, (low, high) in zip(shares, pairwise(bounds), strict=True):
        part = decoder.part(low, high)
        mean = EncodedStream(bytearray(part.encoded_bytes(high - low)))
        exact.append(await share.reduce(runtime, contributors, claims, mean) if high > low else None)
        part.decode_into(mean.data, vector[low:high])
        means.append(mean.data)
    return means, exact


def _at_once(
    codec: Codec, members: Sequence[_Member], shares: Sequence[OwnShare], bounds: Sequence[int],
    contributors: Sequence[int], claims: Sequence[Claim], vector: torch.Tensor,
) -> tuple[list[Buffer], list[Exact | None]]:  # fmt: skip
    """Return `_share_by_share` of weighted sums: neighbouring shares with the same weight of a member are one addition.

    As in `OwnShare.combine`, an owner's own part comes first.
    """
    sums = torch.zeros(len(vector), dtype=torch.float32)
    weights = {owner: share.weights(contributors, claims) for owner, share in enumerate(shares) if len(share.own)}
    for owner in weights.keys() & contributors:
        low, high = members[owner].own
        torch.mul(members[owner].vector[low:high], weights[owner][owner], out=sums[low:high])
    for index in contributors:
        others = [(each[index], owner > index, members[owner].own) for owner, each in weights.items() if owner != index]
        for (weight, _), run in groupby(others, lambda other: other[:2]):
            spans = [span for *_, span in run]
            members[index].add_to(sums, spans[0][0], spans[-1][1], weight)
    data = memoryview(codec.encode(sums))
    codec.decode_into(data, vector)
    means, exact = list[Buffer](), list[Exact | None]()
    for low, high in pairwise(bounds):
        means.append(data[codec.encoded_bytes(low) : codec.encoded_bytes(high)])
        is_lossy = high > low and codec.part(low, high).lossy
        exact.append([(0, high - low, sums[low:high])] if is_lossy else None)
    return means, exact
