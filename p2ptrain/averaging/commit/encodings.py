"""Encodings of a group's parts and means: pure functions of the manifest, the model and the certificate's body.

All members thus choose the same encoding, in the round and in every replay.

=====================================  ==================================  ===========================================
the swarm's codec                      a part                              a share's mean
=====================================  ==================================  ===========================================
dense                                  the same, or smaller if slow        the same
sparse, a weighted mean, few members   the same                            the list of the parts: no further loss
sparse, otherwise                      the same                            dense, `p2ptrain.codecs.dense_codec`
=====================================  ==================================  ===========================================

Members are "few" while the list has fewer bytes than the dense mean (`p2ptrain.codecs.fewer_bytes_listed`). A
`VotingRule` result is no weighted sum of parts. A list of parts would make every member repeat all owners' work.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from p2ptrain.averaging.protocol.certificate import Body
from p2ptrain.averaging.vector.rules import VotingRule, get_rule
from p2ptrain.buffers import Buffer
from p2ptrain.codecs import Codec, Decoder, PartList, codec_at, dense_codec, fewer_bytes_listed, smaller_codecs
from p2ptrain.manifest import AveragingSpec

if TYPE_CHECKING:
    import torch


def part_codecs(spec: AveragingSpec, codec: Codec, num_values: int) -> tuple[Codec, ...]:
    """Return the codecs that a member may encode its own parts in: the swarm's, then ever smaller ones.

    A sparse swarm codec has no alternative, because a list of parts has one codec. Under rules by coordinate no
    alternative is sparse, because the zeros of a slow minority would count as votes.
    """
    if codec.sparse:
        return (codec,)
    smaller = smaller_codecs(codec, num_values)
    return (codec, *(each for each in smaller if not (each.sparse and get_rule(spec).by_coordinate)))


def lists_parts(spec: AveragingSpec, codec: Codec, num_values: int, num_members: int) -> bool:
    """True if a roster of ``num_members`` sends means as lists of their parts."""
    return (
        codec.sparse
        and not isinstance(get_rule(spec), VotingRule)
        and fewer_bytes_listed(codec, dense_codec(codec), num_values, num_members)
    )


def mean_codec(spec: AveragingSpec, codec: Codec, num_values: int, num_members: int, num_contributors: int) -> Decoder:
    """Return the decoder of a whole vector's mean; its `part` is the decoder of a share's mean.

    Args:
        spec: Selects the reduction rule.
        codec: The swarm's codec.
        num_values: Length of the vector.
        num_members: Size of the roster.
        num_contributors: Members of the roster that contributed.

    Raises:
        ValueError: No member contributed.
    """
    if lists_parts(spec, codec, num_values, num_members):
        return PartList(codec, num_contributors)
    return dense_codec(codec)


def decode_means(spec: AveragingSpec, codec: Codec, body: Body, means: Sequence[Buffer], out: torch.Tensor) -> None:
    """Decode the means of a result into ``out``, bit for bit the same at every peer.

    Args:
        spec: Selects the reduction rule.
        codec: The swarm's codec.
        body: Body of the result.
        means: Validated encoded mean of each share.
        out: Overwritten; fp32, shape ``[bounds[-1]]``.
    """
    decoder = mean_codec_of(spec, codec, body)
    for mean, (low, high) in zip(means, pairwise(body.bounds), strict=True):
        if high > low:
            decoder.part(low, high).decode_into(mean, out[low:high])


def mean_codec_of(spec: AveragingSpec, codec: Codec, body: Body) -> Decoder:
    """Return the decoder of a result's means; see `mean_codec`."""
    return mean_codec(spec, codec_at(codec, body.level), body.bounds[-1], len(body.members), len(body.contributors))
