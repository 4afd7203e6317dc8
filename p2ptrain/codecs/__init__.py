"""Codecs: tensors to bytes on the wire and back, by pure functions behind one interface.

`get_codec` returns a codec by its manifest name. See `p2ptrain.codecs.base.Codec` for the contract every codec keeps,
and `p2ptrain.codecs.conformance` for a check of it. `warm_up` makes p2ptrain's own fast. Means of contributions are
encoded densely (`dense_codec`) or are the list of the contributions (`PartList`).
"""

from __future__ import annotations

from p2ptrain.codecs.base import Codec, CodecError, Decoder
from p2ptrain.codecs.native import warm_up
from p2ptrain.codecs.part_list import PartList, fewer_bytes_listed
from p2ptrain.codecs.registry import CODECS, codec_at, codec_names, dense_codec, get_codec, smaller_codecs

__all__ = [
    "CODECS",
    "Codec",
    "CodecError",
    "Decoder",
    "PartList",
    "codec_at",
    "codec_names",
    "dense_codec",
    "fewer_bytes_listed",
    "get_codec",
    "smaller_codecs",
    "warm_up",
]
