"""The codecs that this version knows, by their names in the manifest."""

from __future__ import annotations

from functools import lru_cache

from p2ptrain.codecs.base import Codec
from p2ptrain.errors import IncompatibleError

NAMES = ("fp32", "fp16", "bf16", "int8", "int4", "topk")
"""From the most exact to the most compact. They are listed here because importing the codecs imports torch."""
DENSE = "int8"
"""What a sum of sparse vectors is encoded in."""

COMPACT = ("int4", "topk")
"""Codecs for slow members, from the largest to the smallest."""


def codec_names() -> tuple[str, ...]:
    """The names that `get_codec` accepts, from the most exact to the most compact."""
    return NAMES


@lru_cache(maxsize=1)
def _codecs() -> dict[str, Codec]:
    from p2ptrain.codecs.blockwise import Int4Codec, Int8Codec
    from p2ptrain.codecs.dense import Bf16Codec, Fp16Codec, Fp32Codec
    from p2ptrain.codecs.topk import TopKCodec

    kinds: tuple[type[Codec], ...] = (Fp32Codec, Fp16Codec, Bf16Codec, Int8Codec, Int4Codec, TopKCodec)
    found = {kind.name: kind() for kind in kinds}
    assert tuple(found) == NAMES
    return found


def get_codec(name: str) -> Codec:
    """The codec called ``name`` (its only state is whether it is native, so everybody shares one).

    Raises:
        IncompatibleError: This version has no such codec.
    """
    if name not in NAMES:
        known = ", ".join(NAMES)
        raise IncompatibleError(
            f"unknown codec {name!r}; this version has {known}: correct the name or update p2ptrain"
        )
    return _codecs()[name]


@lru_cache(maxsize=16)
def dense_codec(codec: Codec) -> Codec:
    """What encodes a mean of vectors in ``codec`` that is not sent as a list of them: the same, or int8 if sparse."""
    from p2ptrain.codecs.mixed import MixedCodec

    if isinstance(codec, MixedCodec):
        return codec.mapped(dense_codec) if codec.sparse else codec
    return _codecs()[DENSE] if codec.sparse else codec


def codec_at(codec: Codec, level: int) -> Codec:
    """How groups on a level of the tree average in a swarm with this codec.

    Above level 0 they average means: those of sparse contributions are no longer sparse.
    """
    return _codecs()[DENSE] if level and codec.sparse else codec


def smaller_codecs(codec: Codec, num_values: int) -> tuple[Codec, ...]:
    """What a member too slow for ``codec`` may send its own parts in, with less and less bytes; none beside fp32.

    Args:
        codec: The codec of the swarm's vectors.
        num_values: Their length.
    """
    if not codec.lossy:
        return ()
    limit = codec.encoded_bytes(num_values)
    codecs = [get_codec(name) for name in COMPACT]
    return tuple(each for each in codecs if each.encoded_bytes(num_values) < limit)
