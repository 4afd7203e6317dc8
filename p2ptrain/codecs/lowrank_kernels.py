"""Sums of outer products in numba, in the order and with the roundings of `p2ptrain.codecs.powersgd`.

Never compiled with ``fastmath``, so no product and sum are fused: decoded bits are the same on every machine.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from p2ptrain.codecs.arrays import Floats


@njit(nogil=True, cache=True)
def _expand_row(left: Floats, right: Floats, tile: int, row: int, out: Floats) -> None:
    """One row of a tile: ``left[tile, 0, row] * right[tile, 0] + left[tile, 1, row] * right[tile, 1] + ...``"""
    columns = out.shape[0]
    factor = left[tile, 0, row]
    for column in range(columns):
        out[column] = factor * right[tile, 0, column]
    for rank in range(1, right.shape[1]):
        factor = left[tile, rank, row]
        for column in range(columns):
            out[column] = out[column] + factor * right[tile, rank, column]


@njit(nogil=True, cache=True)
def expand(left: Floats, right: Floats, out: Floats) -> None:
    """Overwrite ``out`` [tiles, rows, columns]; factors are ``[tiles, rank, rows]`` and ``[tiles, rank, columns]``."""
    for tile in range(out.shape[0]):
        for row in range(out.shape[1]):
            _expand_row(left, right, tile, row, out[tile, row])


@njit(nogil=True, cache=True)
def add(left: Floats, right: Floats, weight: np.float32, out: Floats) -> None:
    """Add ``weight`` times what `expand` gives to ``out``."""
    terms = np.empty(out.shape[2], np.float32)
    for tile in range(out.shape[0]):
        for row in range(out.shape[1]):
            _expand_row(left, right, tile, row, terms)
            for column in range(out.shape[2]):
                term = terms[column] * weight
                out[tile, row, column] = out[tile, row, column] + term
