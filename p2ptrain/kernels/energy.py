"""Sums of squares of fp32 values as LLVM IR, added up in the order of `p2ptrain.codecs.norms.sums_of_squares`.

A block is `CHUNK_VALUES` values, in rows of `COLUMNS`. Row by row, the square of each value, in fp32, is added to
its column in the target, which the caller has cleared; what is left, to add up the columns, is little work in NumPy.
"""

from __future__ import annotations

from p2ptrain.kernels.emit import F32, LANES, Block, Kernel, Value, vector

CHUNK_VALUES = 1 << 14
COLUMNS = 1024


def add_squares(block: Block) -> None:
    """Add the squares of a chunk of fp32 to the columns in the target."""
    build = block.build

    def add_row(row: Value) -> None:
        for column in range(0, COLUMNS, LANES):
            values = block.load(vector(F32), block.scaled(row, 4 * COLUMNS, 4 * column))
            square = build.fmul(values, values)
            block.store(build.fadd(block.target.load(vector(F32), 4 * column), square), 4 * column)

    block.repeat(CHUNK_VALUES // COLUMNS, add_row)


def kernels() -> dict[str, Kernel]:
    """``energy_fp32``."""
    return {"energy_fp32": Kernel(4 * CHUNK_VALUES, 4 * COLUMNS, add_squares)}
