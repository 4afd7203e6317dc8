"""The codecs on this machine, by their manifest names."""

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
"""p2ptrain's own codecs, from the most exact to the most compact; loading one imports torch."""

DENSE = "int8"
"""Codec for sums of sparse vectors."""

COMPACT = ("int4", "topk")
"""Codecs for slow members, in order of decreasing size."""


def codec_names() -> tuple[str, ...]:
    """Return the names of p2ptrain's own codecs, from the most exact to the most compact."""
    return CODECS.own


def get_codec(name: str) -> Codec:
    """Return the shared, stateless codec called ``name``.

    Raises `IncompatibleError` if this machine has no such codec, or a package's codec fails `check_codec`.
    """
    return CODECS.get(name)


@lru_cache(maxsize=16)
def dense_codec(codec: Codec) -> Codec:
    """Return the codec for means of vectors in ``codec``: the same, or int8 if it is sparse."""
    from p2ptrain.codecs.mixed import MixedCodec

    if isinstance(codec, MixedCodec):
        return codec.mapped(dense_codec) if codec.sparse else codec
    return get_codec(DENSE) if codec.sparse else codec


def codec_at(codec: Codec, level: int) -> Codec:
    """Return the codec for groups on ``level`` of the tree; above level 0 means are no longer sparse."""
    return get_codec(DENSE) if level and codec.sparse else codec


def smaller_codecs(codec: Codec, num_values: int) -> tuple[Codec, ...]:
    """Return smaller codecs for a member too slow for ``codec``, by decreasing size; none for a lossless codec."""
    if not codec.lossy:
        return ()
    limit = codec.encoded_bytes(num_values)
    codecs = [get_codec(name) for name in COMPACT]
    return tuple(each for each in codecs if each.encoded_bytes(num_values) < limit)
