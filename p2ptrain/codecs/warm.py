"""Putting the kernels to use, after a check against torch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

import torch

from p2ptrain.codecs.native import KernelCodec
from p2ptrain.codecs.registry import codec_names, get_codec
from p2ptrain.kernels import Kernel, load_kernels

logger = logging.getLogger(__name__)

SAMPLE_BLOCKS = 12
_once = threading.Lock()


def warm_up() -> bool:
    """Let all codecs use kernels from now on, if this machine can have them; idempotent, safe from any thread.

    Codecs work before and meanwhile, with the same bits. It takes some 100 ms, and a second the first time on an
    installation: call it off the event loop when a peer starts.

    Returns:
        Whether every codec that can has kernels now. Why not is logged.
    """
    with _once:
        codecs = [codec for name in codec_names() if isinstance(codec := get_codec(name), KernelCodec)]
        if not any(codec.kernels for codec in codecs):
            found = load_kernels()
            for codec in codecs:
                kernels = kernels_of(codec, found)
                if agree(codec, kernels):
                    codec.kernels = kernels
                else:
                    logger.error("the kernels of %s differ from torch on this machine: they are not used", codec.name)
        return all(codec.kernels for codec in codecs)


def kernels_of(codec: KernelCodec, found: Mapping[str, Kernel]) -> dict[str, Kernel]:
    """Those of all kernels that belong to one codec, by operation."""
    return {name.partition("_")[0]: found[name] for name in found if name.endswith(f"_{codec.name}")}


def agree(codec: KernelCodec, kernels: Mapping[str, Kernel]) -> bool:
    """Whether the kernels compute what torch does on a sample with blocks of all magnitudes."""
    plain, native = type(codec)(), type(codec)()
    native.kernels = kernels
    vector = _sample(codec.kernel_values)
    encoded = plain.encode(vector)
    start = vector.flip(0).contiguous()
    decoded, summed = [torch.empty_like(vector) for _ in range(2)], [start.clone() for _ in range(2)]
    for index, one in enumerate((plain, native)):
        one.decode_into(encoded, decoded[index])
        one.accumulate_into(encoded, 1 / 3, summed[index])
    return native.encode(vector) == encoded and all(
        torch.equal(one.view(torch.int32), other.view(torch.int32)) for one, other in (decoded, summed)
    )


def _sample(block_values: int) -> torch.Tensor:
    """Blocks of twelve magnitudes, with zeros, halves and equal values among them, and a short last block."""
    step = torch.arange(SAMPLE_BLOCKS * block_values, dtype=torch.int64) * 2_654_435_761 % 65_536 - 32_768
    exponents = torch.linspace(-155, -1, SAMPLE_BLOCKS).round().to(torch.int32)[:, None]
    values = torch.ldexp(step.to(torch.float32).view(SAMPLE_BLOCKS, block_values), exponents)
    values[1, ::3], values[2], values[3] = 0.0, -0.0, 0.7
    return torch.cat([values.flatten(), values[-1, :7]])
