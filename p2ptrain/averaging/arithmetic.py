"""The arithmetic of a round in one process: all members' parts, all owners' means, without messages and votes.

It gives the bits of `p2ptrain.averaging.averager` where all members are reachable, equally fast, in time and trusted.
`p2ptrain.training.simulation` runs it. It holds one encoded vector for each member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from p2ptrain.averaging.allreduce.bandwidth import share_weights, split_shares
from p2ptrain.averaging.commit.attempt import lists_parts, mean_codec
from p2ptrain.averaging.grouping.cells import Cells, Key, delegate_order
from p2ptrain.averaging.protocol.table import FULL_TRUST
from p2ptrain.averaging.vector.chunks import chunk_values, cut
from p2ptrain.averaging.vector.error_feedback import Encoded, feedback_scale
from p2ptrain.averaging.vector.reduce import EncodedStream, ExactMean, OwnShare
from p2ptrain.averaging.vector.rules import Claim
from p2ptrain.buffers import Buffer
from p2ptrain.codecs import Codec, codec_at, dense_codec
from p2ptrain.manifest import AveragingSpec
from p2ptrain.runtime import Runtime


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


def draw_groups(peers: Sequence[str], group_size: int, round_: int, lineage: bytes) -> dict[Key, list[str]]:
    """Return the members of each group on the lowest level, as in a swarm that knows its size.

    A peer whose cell is full is in none: its work waits for the next round.
    """
    cells, groups = Cells(group_size), dict[Key, list[str]]()
    for peer in delegate_order(lineage, round_, 0, peers):
        group = groups.setdefault(cells.key_of(Key(round_, lineage, len(peers)), peer), [])
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
    parts: list[dict[int, Buffer]] = [{} for _ in updates]
    shares = [_share(spec, codec, updates, owner, span, parts) for owner, span in enumerate(pairwise(bounds))]
    agreed = frozenset.intersection(*(share.judge([FULL_TRUST] * count) for share in shares if len(share.own)))
    contributors = sorted(agreed)
    claims = [Claim(updates[index].tokens) for index in contributors]
    decoder = mean_codec(spec, codec, num_values, count, len(contributors))
    means, exact = [], list[ExactMean | None]()
    vector = torch.empty(num_values, dtype=torch.float32)
    for share, (low, high) in zip(shares, pairwise(bounds), strict=True):
        mean = EncodedStream(bytearray(decoder.encoded_bytes(high - low) if high > low else 0))
        exact.append(await share.reduce(runtime, contributors, claims, mean) if high > low else None)
        if high > low:
            decoder.part(low, high).decode_into(mean.data, vector[low:high])
        means.append(mean.data)
    encoded, sent = {}, {}
    for index, update in enumerate(updates):
        others = sum(len(part) for owner, part in parts[index].items() if owner != index)
        sent[update.peer] = others + (count - 1) * len(means[index])
        if index not in agreed:
            continue
        scale = (scales or {}).get(update.peer, 1.0)
        encoded[update.peer] = [
            Encoded(
                vector=update.vector, bounds=bounds, sent_parts=parts[index], part_codec=codec, part_scale=scale,
                own_index=index, own_mean_exact=exact[index], own_mean=means[index], mean_codec=dense_codec(codec),
                mean_scale=scale * feedback_scale(spec, claims, contributors.index(index)),
            )
        ]  # fmt: skip
    return RoundMean(vector, sum(claim.tokens for claim in claims), encoded, sent)


def _share(
    spec: AveragingSpec,
    codec: Codec,
    updates: Sequence[Update],
    owner: int,
    span: tuple[int, int],
    parts: list[dict[int, Buffer]],
) -> OwnShare:
    """Return an owner's share with all members' parts, which are added to ``parts`` by member and owner."""
    low, high = span
    part, num_values = codec.part(low, high), len(updates[0].vector)
    share = OwnShare(
        dense_codec(codec).part(low, high), spec, updates[owner].vector[low:high], owner, len(updates),
        part if codec.sparse else None, lists_parts(spec, codec, num_values, len(updates)), chunk=chunk_values(codec),
    )  # fmt: skip
    if high == low:
        return share
    share.measure_own()
    if share.own_part is not None:
        parts[owner][owner] = share.own_part
    for index, update in enumerate(updates):
        if index == owner:
            continue
        values = update.vector[low:high]
        encoded = part.encoded_view(values)
        data: Buffer = part.encode(values) if encoded is None else encoded
        check = share.new_check(part)
        for first, last in cut(high - low, part.block_size):
            check(memoryview(data)[part.encoded_bytes(first) : part.encoded_bytes(last)], first, last)
        share.add(index, data, check)
        parts[index][owner] = data
    return share
