"""Sums of squares as LLVM IR, added up in the order of `p2ptrain.codecs.norms.sums_of_squares`.

A block is `CHUNK_VALUES` values, in rows of `COLUMNS`. Row by row, the square of each value, in fp32, is added to
its column in the target, which the caller has cleared; what is left, to add up the columns, is little work in NumPy.
"""

from __future__ import annotations

from functools import partial

from p2ptrain.kernels.emit import F32, I8, I32, LANES, Block, Kernel, Value, vector

CHUNK_VALUES = 1 << 14
COLUMNS = 1024
_INT8_VALUES = 256
_INT8_BYTES = 4 + _INT8_VALUES


def add_squares(is_int8: bool, block: Block) -> None:
    """Add the squares of a chunk, encoded in ``int8`` or fp32, to the columns in the target."""
    build = block.build

    def add(values: Value, column: int) -> None:
        square = build.fmul(values, values)
        block.store(build.fadd(block.target.load(vector(F32), 4 * column), square), 4 * column)

    def add_fp32_row(row: Value) -> None:
        for column in range(0, COLUMNS, LANES):
            add(block.load(vector(F32), block.scaled(row, 4 * COLUMNS, 4 * column)), column)

    def add_int8_row(row: Value) -> None:
        for first in range(0, COLUMNS, _INT8_VALUES):
            start = block.scaled(row, COLUMNS // _INT8_VALUES * _INT8_BYTES, first // _INT8_VALUES * _INT8_BYTES)
            scales = block.splat(block.load(F32, start))
            for i in range(0, _INT8_VALUES, LANES):
                codes = block.load(vector(I8), block.scaled(start, 1, 4 + i))
                add(build.fmul(build.sitofp(build.sext(codes, vector(I32)), vector(F32)), scales), first + i)

    block.repeat(CHUNK_VALUES // COLUMNS, add_int8_row if is_int8 else add_fp32_row)


def kernels() -> dict[str, Kernel]:
    """``energy_int8`` and ``energy_fp32``."""
    return {
        "energy_int8": Kernel(CHUNK_VALUES // _INT8_VALUES * _INT8_BYTES, 4 * COLUMNS, partial(add_squares, True)),
        "energy_fp32": Kernel(4 * CHUNK_VALUES, 4 * COLUMNS, partial(add_squares, False)),
    }
