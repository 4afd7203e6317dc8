"""Argument checks of codecs, and their chunk size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from p2ptrain.codecs.base import CodecError

if TYPE_CHECKING:
    import torch

CHUNK_VALUES = 65_536
"""Values per inner step: 256 KiB of fp32, so that several passes stay in a core's L2 cache."""

Buffer = bytes | bytearray | memoryview
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def check_vector(vector: torch.Tensor) -> torch.Tensor:
    """Return ``vector`` detached; raises `ValueError` unless it is a contiguous, one-dimensional fp32 CPU tensor."""
    import torch

    if vector.dtype != torch.float32 or vector.dim() != 1 or vector.device.type != "cpu" or not vector.is_contiguous():
        raise ValueError(
            f"codecs take contiguous fp32 CPU vectors, not {vector.dtype} {tuple(vector.shape)} on {vector.device}"
        )
    return vector.detach()


def check_weight(weight: float) -> float:
    """Return ``weight`` rounded to fp32, as in every implementation; raises `ValueError` if it is not finite."""
    with np.errstate(over="ignore"):
        rounded = float(np.float32(weight))
    if not math.isfinite(rounded):
        raise ValueError(f"a weight must be finite in fp32, not {weight}")
    return rounded


def byte_array(data: Buffer, expected_bytes: int, codec: str) -> npt.NDArray[np.uint8]:
    """Return ``data`` as ``uint8[expected_bytes]`` without a copy; raises `CodecError` for another length."""
    view = memoryview(data)
    if view.nbytes != expected_bytes:
        raise CodecError(f"{codec}: got {view.nbytes} bytes where {expected_bytes} were expected")
    return np.frombuffer(view, dtype=np.uint8)


def writable_byte_array(out: bytearray | memoryview, expected_bytes: int, codec: str) -> npt.NDArray[np.uint8]:
    """Return `byte_array` of ``out``; raises `ValueError` if it is read-only."""
    array = byte_array(out, expected_bytes, codec)
    if not array.flags.writeable:
        raise ValueError(f"{codec}: cannot encode into read-only memory")
    return array


def chunks(num_items: int, items_per_chunk: int) -> Iterator[slice]:
    """Yield consecutive slices of at most ``items_per_chunk`` that cover ``[0, num_items)``."""
    for start in range(0, num_items, items_per_chunk):
        yield slice(start, min(start + items_per_chunk, num_items))
