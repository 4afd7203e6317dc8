"""Codecs: tensors to bytes on the wire and back, as stateless objects behind one interface.

`p2ptrain.codecs.base.Codec` is the contract, `p2ptrain.codecs.conformance` checks it, and `get_codec` returns a codec
by its manifest name. `warm_up` loads the native versions. A mean of contributions is either encoded densely
(`dense_codec`) or sent as the list of the contributions (`PartList`).
"""

from __future__ import annotations

from p2ptrain.codecs.base import Codec, CodecError, Decoder
from p2ptrain.codecs.part_list import PartList, fewer_bytes_listed
from p2ptrain.codecs.registry import CODECS, codec_at, dense_codec, get_codec, smaller_codecs, warm_up

__all__ = [
    "CODECS",
    "Codec",
    "CodecError",
    "Decoder",
    "PartList",
    "codec_at",
    "dense_codec",
    "fewer_bytes_listed",
    "get_codec",
    "smaller_codecs",
    "warm_up",
]
