"""Norms with the same bits on every CPU, so that every peer can recompute decisions based on them."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

CHUNK_VALUES = 65_536
"""Values whose squares are summed in fp32: 256 KiB, which stay in a core's L2 cache."""
SUM_COLUMNS = 256
"""Partial sums of a chunk. A change of either number changes the order of roundings, and so the norms."""
HALVED_COLUMNS = 1024
"""Partial sums in `sums_of_squares`; a power of two."""


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


def halved(columns: npt.NDArray[np.float32]) -> list[float]:
    """Return the sum of each row of fp32 ``[rows, HALVED_COLUMNS]``, added by halves in fp64."""
    sums = columns.astype(np.float64)
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    found: list[float] = sums[:, 0].tolist()
    return found
