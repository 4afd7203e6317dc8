"""Norms that have the same bits on every CPU, so that what is decided by them can be recomputed elsewhere."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

CHUNK_VALUES = 65_536
"""Values whose squares are added up in fp32: 256 KiB, which stay in a core's L2 cache."""
SUM_COLUMNS = 256
"""Partial sums of a chunk. Both numbers decide in which order additions round: whoever changes them changes norms."""
HALVED_COLUMNS = 1024
"""Partial sums in `sums_of_squares`; a power of two."""


def sum_of_squares(vector: torch.Tensor, scratch: torch.Tensor | None = None) -> float:
    """The sum of the squares of a finite fp32 vector, to about ``1e-5``, with the same bits on every CPU.

    Library reductions add in an order that depends on the width of a CPU's registers. Here, squares are rounded to fp32
    one by one, 256 columns are added up row by row, and the columns exactly (`math.fsum`).

    Args:
        vector: fp32, shape ``[n]``, contiguous, CPU; not changed. A square beyond fp32 gives infinity.
        scratch: Room for the squares of a chunk: fp32, ``[min(n, CHUNK_VALUES)]`` or more.
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
    """The sum of the squares of each ``step`` consecutive values of a finite fp32 vector, the last ones maybe fewer.

    As `sum_of_squares`, with the same bits on every CPU; but of many short pieces at once, whose columns are added up
    by halves in fp64.

    Args:
        vector: fp32, shape ``[n]``, contiguous, CPU; not changed. A square beyond fp32 gives infinity.
        step: A multiple of `HALVED_COLUMNS`, at most `CHUNK_VALUES`.
        scratch: As for `sum_of_squares`.
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
    """The sum of each row of fp32 ``[rows, HALVED_COLUMNS]``, added up by halves in fp64."""
    sums = columns.astype(np.float64)
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    found: list[float] = sums[:, 0].tolist()
    return found
