"""The codecs that this version knows, by their names in the manifest."""

from __future__ import annotations

from p2ptrain.codecs.base import Codec
from p2ptrain.codecs.blockwise import Int4Codec, Int8Codec
from p2ptrain.codecs.dense import Bf16Codec, Fp16Codec, Fp32Codec
from p2ptrain.codecs.powersgd import PowerSgdCodec
from p2ptrain.codecs.topk import TopKCodec
from p2ptrain.errors import IncompatibleError

_CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (Fp32Codec(), Fp16Codec(), Bf16Codec(), Int8Codec(), Int4Codec(), PowerSgdCodec(), TopKCodec())
}


def codec_names() -> tuple[str, ...]:
    """The names that `get_codec` accepts, from the most exact to the most compact."""
    return tuple(_CODECS)


def get_codec(name: str) -> Codec:
    """The codec called ``name`` (codecs hold no state, so everybody shares one).

    Raises:
        IncompatibleError: This version has no such codec.
    """
    codec = _CODECS.get(name)
    if codec is None:
        known = ", ".join(_CODECS)
        raise IncompatibleError(
            f"unknown codec {name!r}; this version has {known}: correct the name or update p2ptrain"
        )
    return codec
