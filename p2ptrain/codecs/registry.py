"""The codecs of this machine, by their names in the manifest."""

from __future__ import annotations

from functools import lru_cache

from p2ptrain.codecs.base import Codec
from p2ptrain.extensions import Extensions

CODECS = Extensions(
    "p2ptrain.codecs",
    "codec",
    Codec,
    {
        "fp32": "p2ptrain.codecs.dense:Fp32Codec",
        "fp16": "p2ptrain.codecs.dense:Fp16Codec",
        "bf16": "p2ptrain.codecs.dense:Bf16Codec",
        "int8": "p2ptrain.codecs.blockwise:Int8Codec",
        "int4": "p2ptrain.codecs.blockwise:Int4Codec",
        "topk": "p2ptrain.codecs.topk:TopKCodec",
    },
    "p2ptrain.codecs.conformance:check_codec",
)
"""p2ptrain's own from the most exact to the most compact; loading one imports torch."""

DENSE = "int8"
"""Codec of sums of sparse vectors."""

COMPACT = ("int4", "topk")
"""Codecs for slow members, from the largest to the smallest."""


def codec_names() -> tuple[str, ...]:
    """Return the names of p2ptrain's own codecs, from the most exact to the most compact."""
    return CODECS.own


def get_codec(name: str) -> Codec:
    """Return the codec called ``name``: one for all callers, which has no state.

    Raises:
        IncompatibleError: This machine has no such codec, or the one that a package brings fails `check_codec`.
    """
    return CODECS.get(name)


@lru_cache(maxsize=16)
def dense_codec(codec: Codec) -> Codec:
    """Return the codec of means of vectors in ``codec``: the same, or int8 if it is sparse. A `PartList` needs none."""
    from p2ptrain.codecs.mixed import MixedCodec

    if isinstance(codec, MixedCodec):
        return codec.mapped(dense_codec) if codec.sparse else codec
    return get_codec(DENSE) if codec.sparse else codec


def codec_at(codec: Codec, level: int) -> Codec:
    """Return the codec of groups on a level of the tree, in a swarm with this codec.

    Above level 0 they average means: those of sparse contributions are no longer sparse.
    """
    return get_codec(DENSE) if level and codec.sparse else codec


def smaller_codecs(codec: Codec, num_values: int) -> tuple[Codec, ...]:
    """Return smaller codecs for the parts of a member too slow for ``codec``, the largest first; none beside fp32.

    Args:
        codec: The codec of the swarm's vectors.
        num_values: Their length.
    """
    if not codec.lossy:
        return ()
    limit = codec.encoded_bytes(num_values)
    codecs = [get_codec(name) for name in COMPACT]
    return tuple(each for each in codecs if each.encoded_bytes(num_values) < limit)
