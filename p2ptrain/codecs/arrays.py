"""The parts that codecs share: argument checks, chunks, and norms with the same bits on every CPU.

Every peer can recompute decisions that are based on such norms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from p2ptrain.buffers import Buffer

if TYPE_CHECKING:
    import torch

CHUNK_VALUES = 65_536
"""Values per inner step: 256 KiB of fp32, so that several passes stay in a core's L2 cache. `sum_of_squares` adds the
squares of so many values in fp32."""
SUM_COLUMNS = 256
"""Partial sums of a chunk in `sum_of_squares`. A change of either number changes the order of roundings, and so the
norms."""
HALVED_COLUMNS = 1024
"""Partial sums in `sums_of_squares`; a power of two."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class CodecError(ValueError):
    """Encoded bytes are malformed, or a value cannot be encoded."""


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


def byte_array(data: Buffer, expected_bytes: int, codec: str) -> Bytes:
    """Return ``data`` as ``uint8[expected_bytes]`` without a copy; raises `CodecError` for another length."""
    view = memoryview(data)
    if view.nbytes != expected_bytes:
        raise CodecError(f"{codec}: got {view.nbytes} bytes where {expected_bytes} were expected")
    return np.frombuffer(view, dtype=np.uint8)


def writable_byte_array(out: bytearray | memoryview, expected_bytes: int, codec: str) -> Bytes:
    """Return `byte_array` of ``out``; raises `ValueError` if it is read-only."""
    array = byte_array(out, expected_bytes, codec)
    if not array.flags.writeable:
        raise ValueError(f"{codec}: cannot encode into read-only memory")
    return array


def chunks(num_items: int, items_per_chunk: int) -> Iterator[slice]:
    """Yield consecutive slices of at most ``items_per_chunk`` that cover ``[0, num_items)``."""
    for start in range(0, num_items, items_per_chunk):
        yield slice(start, min(start + items_per_chunk, num_items))


def sum_of_squares(vector: torch.Tensor, scratch: torch.Tensor | None = None) -> float:
    """Return the sum of the squares of a finite fp32 vector, to about ``1e-5``, with the same bits on every CPU.

    The order of library reductions depends on the width of a CPU's registers. Here each square is rounded to fp32, 256
    columns are added row by row, and the columns are added exactly (`math.fsum`).

    Args:
        vector: fp32, shape ``[n]``, contiguous, CPU; not changed. A square beyond fp32 gives infinity.
        scratch: Buffer for the squares of a chunk: fp32, ``[min(n, CHUNK_VALUES)]`` or more.
    """
    values = vector.detach().numpy()
    room = np.empty(min(len(values), CHUNK_VALUES), np.float32) if scratch is None else scratch.numpy()
    total = 0.0
    with np.errstate(over="ignore", under="ignore"):
        for start in range(0, len(values), CHUNK_VALUES):
            piece = values[start : start + CHUNK_VALUES]
            squares = room[: len(piece)]
            np.multiply(piece, piece, out=squares)
            whole = len(squares) // SUM_COLUMNS * SUM_COLUMNS
            columns = np.add.reduce(squares[:whole].reshape(-1, SUM_COLUMNS), axis=0)
            total += math.fsum(columns.tolist() + squares[whole:].tolist())
    return total


def sums_of_squares(vector: torch.Tensor, step: int, scratch: torch.Tensor | None = None) -> list[float]:
    """Return the sum of the squares of each ``step`` consecutive values; the last piece may be shorter.

    As `sum_of_squares`, with the same bits on every CPU, but fast for many short pieces: the columns are added by
    halves in fp64. ``step`` is a multiple of `HALVED_COLUMNS`, at most `CHUNK_VALUES`.
    """
    values = vector.detach().numpy()
    whole, at_once = len(values) // step * step, CHUNK_VALUES // step * step
    room = np.empty(min(len(values), CHUNK_VALUES), np.float32) if scratch is None else scratch.numpy()
    energies: list[float] = []
    with np.errstate(over="ignore", under="ignore"):
        for start in range(0, whole, at_once):
            piece = values[start : min(start + at_once, whole)]
            squares = room[: len(piece)]
            np.multiply(piece, piece, out=squares)
            energies += halved(np.add.reduce(squares.reshape(-1, step // HALVED_COLUMNS, HALVED_COLUMNS), axis=1))
    return [*energies, sum_of_squares(vector[whole:], scratch)] if whole < len(values) else energies


def halved(columns: Floats) -> list[float]:
    """Return the sum of each row of fp32 ``[rows, HALVED_COLUMNS]``, added by halves in fp64."""
    sums = columns.astype(np.float64)
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    found: list[float] = sums[:, 0].tolist()
    return found
