"""How tensors become bytes on the wire: pure functions behind one interface.

`get_codec` returns a codec by its manifest name; `codec_names` lists them, and `smaller_codecs` those for members that
are slow. See `p2ptrain.codecs.base.Codec` for the contract every codec keeps. `warm_up` makes them fast. Means of
contributions are encoded densely (`dense_codec`) or are the list of the contributions (`PartList`).
"""

from __future__ import annotations

from p2ptrain.codecs.base import Codec, CodecError, Decoder
from p2ptrain.codecs.part_list import PartList
from p2ptrain.codecs.registry import codec_at, codec_names, dense_codec, get_codec, smaller_codecs
from p2ptrain.codecs.warm import warm_up

__all__ = [
    "Codec",
    "CodecError",
    "Decoder",
    "PartList",
    "codec_at",
    "codec_names",
    "dense_codec",
    "get_codec",
    "smaller_codecs",
    "warm_up",
]
