"""In which encodings parts and means of a group travel: pure functions of what all members share.

All members come to the same answer, at the round and at any replay of it, because it depends on the manifest, the
model and the certificate's body alone.

=====================================  ==================================  ===========================================
the swarm's codec                      a part                              a share's mean
=====================================  ==================================  ===========================================
dense                                  the same, or smaller if slow        the same
sparse, a weighted mean, few members   the same                            the list of the parts: nothing more is lost
sparse, otherwise                      the same                            dense, `p2ptrain.codecs.dense_codec`
=====================================  ==================================  ===========================================

"Few" is while the list is shorter than the dense mean (`p2ptrain.codecs.fewer_bytes_listed`). Under a
`VotingRule` the result is not a sum of parts with a weight each: a value's median is one member's here and another's
there, and ``centered_clip`` starts from it. A list of parts could carry such a result only if everybody ran the rule on
it, at the cost of all owners' work for each.
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
    """What a member may encode its own parts in, the usual one first, the others with less and less bytes.

    A sparse codec is alone: there is nothing much smaller, and a list of parts has one codec. Under rules by
    coordinate none is sparse, because the zeros of a slow minority would count as votes.

    Args:
        spec: The rule.
        codec: The swarm's.
        num_values: Length of its vectors.
    """
    if codec.sparse:
        return (codec,)
    smaller = smaller_codecs(codec, num_values)
    return (codec, *(each for each in smaller if not (each.sparse and get_rule(spec).by_coordinate)))


def lists_parts(spec: AveragingSpec, codec: Codec, num_values: int, num_members: int) -> bool:
    """Whether a roster of ``num_members`` sends means as lists of their parts."""
    return (
        codec.sparse
        and not isinstance(get_rule(spec), VotingRule)
        and fewer_bytes_listed(codec, dense_codec(codec), num_values, num_members)
    )


def mean_codec(spec: AveragingSpec, codec: Codec, num_values: int, num_members: int, num_contributors: int) -> Decoder:
    """How the mean of a whole vector would be encoded; ask its `part` for that of a share.

    Args:
        spec: The rule.
        codec: The swarm's.
        num_values: Length of its vectors.
        num_members: Size of the roster.
        num_contributors: How many of them contributed.

    Raises:
        ValueError: Nobody did.
    """
    if lists_parts(spec, codec, num_values, num_members):
        return PartList(codec, num_contributors)
    return dense_codec(codec)


def decode_means(spec: AveragingSpec, codec: Codec, body: Body, means: Sequence[Buffer], out: torch.Tensor) -> None:
    """Decode the means of a result, bit for bit the same for all that hold it.

    Args:
        spec: The rule.
        codec: The swarm's.
        body: Of the result.
        means: The encoded mean of each share, checked.
        out: Overwritten; fp32, shape ``[bounds[-1]]``.
    """
    decoder = mean_codec_of(spec, codec, body)
    for mean, (low, high) in zip(means, pairwise(body.bounds), strict=True):
        if high > low:
            decoder.part(low, high).decode_into(mean, out[low:high])


def mean_codec_of(spec: AveragingSpec, codec: Codec, body: Body) -> Decoder:
    """How the means of a result are encoded; see `mean_codec`."""
    return mean_codec(spec, codec_at(codec, body.level), body.bounds[-1], len(body.members), len(body.contributors))
