"""The codecs on this machine, by their manifest names, and their native functions."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from p2ptrain.codecs.base import ENERGY_VALUES, Codec, CodecError, NativeCodec
from p2ptrain.extensions import Extensions
from p2ptrain.native.load import Function, load_functions

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

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
SAMPLE_BLOCKS = 12
_once = threading.Lock()


get_codec = CODECS.get
"""Returns the shared, stateless codec of a name.

Raises `IncompatibleError` if this machine has no such codec, or a package's codec fails `check_codec`.
"""


@lru_cache(maxsize=16)
def dense_codec(codec: Codec) -> Codec:
    """Return the codec for means of vectors in ``codec``: the same, or int8 if it is sparse."""
    from p2ptrain.codecs.mixed import MixedCodec

    if isinstance(codec, MixedCodec):
        return codec.mapped(dense_codec) if codec.sparse else codec
    return get_codec(DENSE) if codec.sparse else codec


@lru_cache(maxsize=16)
def codec_at(codec: Codec, level: int) -> Codec:
    """Return the codec for groups on ``level`` of the tree; above level 0 means are no longer sparse."""
    return dense_codec(codec) if level else codec


def _in_blocks(smaller: Codec, codec: Codec) -> Codec:
    return smaller if codec.block_size > 1 else codec


@lru_cache(maxsize=16)
def smaller_codecs(codec: Codec, num_values: int) -> tuple[Codec, ...]:
    """Return smaller codecs for a member too slow for ``codec``, by decreasing size; none for a lossless codec.

    Of a mixture, the spans in blocks alone are smaller, where the new blocks fit the cuts of shares.
    """
    from p2ptrain.codecs.mixed import MixedCodec

    if not codec.lossy:
        return ()
    limit = codec.encoded_bytes(num_values)
    codecs = [get_codec(name) for name in COMPACT]
    if isinstance(codec, MixedCodec):
        fitting = [each for each in codecs if codec.block_size % each.block_size == 0]
        codecs = [codec.mapped(partial(_in_blocks, each)) for each in fitting]
    return tuple(each for each in codecs if each.encoded_bytes(num_values) < limit)


def warm_up() -> bool:
    """Switch all codecs to the native library, if there is one; True if every codec is native now.

    Idempotent, safe from any thread. Codecs work before and during the call, with the same bits. A missing library is
    built first, which takes seconds: call it off the event loop. Failures are logged.
    """
    with _once:
        codecs = [codec for name in CODECS.own if isinstance(codec := get_codec(name), NativeCodec)]
        if not any(codec.functions for codec in codecs):
            found = load_functions()
            for codec in codecs:
                functions = found.get(codec.name, {})
                if agree(codec, functions):
                    codec.functions = functions
                else:
                    logger.error(
                        "the native %s differs from the plain code on this machine: it is not used", codec.name
                    )
        return all(codec.functions for codec in codecs)


def agree(codec: NativeCodec, functions: Mapping[str, Function]) -> bool:
    """True if ``functions`` give the plain codec's results on a sample with values of all magnitudes."""
    import torch

    plain, native = type(codec)(), type(codec)()
    native.functions = functions
    vector = _sample(codec.native_values)
    encoded = plain.encode(vector)
    start = vector.flip(0).contiguous()
    # Not `empty`, which may return memory with the right values of an earlier check.
    decoded, summed = [torch.full_like(vector, torch.nan) for _ in range(2)], [start.clone() for _ in range(2)]
    try:
        for index, one in enumerate((plain, native)):
            one.decode_into(encoded, decoded[index])
            one.accumulate_into(encoded, 1 / 3, summed[index])
        if "squares" in functions:
            norms = [each.squared_norms(encoded, len(vector), codec.block_size) for each in (plain, native)]
            if norms[0] != norms[1]:
                return False
        if "validate" in functions:
            native.validate(encoded, len(vector))
        if "encode" in functions and native.encode(vector) != encoded:
            return False
        if "energy" in functions and not _agree_on_norms(plain, native, vector):
            return False
    except CodecError:
        return False
    return all(torch.equal(one.view(torch.int32), other.view(torch.int32)) for one, other in (decoded, summed))


def _agree_on_norms(plain: NativeCodec, native: NativeCodec, vector: torch.Tensor) -> bool:
    wide = vector.repeat(5 * ENERGY_VALUES // 2 // len(vector) + 1)
    encoded = plain.encode(wide)
    found = [one.squared_norms(encoded, len(wide), ENERGY_VALUES) for one in (plain, native)]
    return found[0] == found[1]


def _sample(block_values: int) -> torch.Tensor:
    """Return blocks of twelve magnitudes, with zeros, halves and equal values among them, and a short last block."""
    import torch

    # NumPy computes on this thread alone.
    steps = np.arange(SAMPLE_BLOCKS * block_values, dtype=np.int64) * 2_654_435_761 % 65_536 - 32_768
    exponents = np.linspace(-155, -1, SAMPLE_BLOCKS).round().astype(np.int32)[:, None]
    values = np.ldexp(steps.astype(np.float32).reshape(SAMPLE_BLOCKS, block_values), exponents)
    values[1, ::3], values[2], values[3] = 0.0, -0.0, 0.7
    return torch.from_numpy(np.concatenate([values.ravel(), values[-1, :7]]))
