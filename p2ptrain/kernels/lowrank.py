"""Whole tiles of ``powersgd`` as LLVM IR: the sums of outer products of `p2ptrain.codecs.powersgd`, in its order.

Encoding is matrix products, which torch has in BLAS.
"""

from __future__ import annotations

from functools import partial

from p2ptrain.kernels.emit import F32, I8, I64, LANES, Block, Kernel, Value, vector

SIDE, RANK = 256, 8
FACTOR_BYTES = SIDE + 4
"""A column of P or Q: the scale, and its codes."""


def kernels() -> dict[str, Kernel]:
    """The kernels of ``powersgd`` by their names."""
    source, target = 2 * RANK * FACTOR_BYTES, 4 * SIDE * SIDE
    return {
        "decode_powersgd": Kernel(source, target, partial(decode, False)),
        "accumulate_powersgd": Kernel(source, target, partial(decode, True)),
    }


def decode(weighted: bool, block: Block) -> None:
    """Overwrite a tile with the decoded values; or, ``weighted``, add them times the weight."""
    build = block.build
    left_at, right_at = ([FACTOR_BYTES * (first + rank) for rank in range(RANK)] for first in (0, RANK))
    left_scales = [block.load(F32, at) for at in left_at]
    right_scales = [block.splat(block.load(F32, at)) for at in right_at]
    weights = block.splat(block.weight)
    right = block.scratch(4 * RANK * SIDE)

    def decode_right(part: Value) -> None:
        for rank, scales in enumerate(right_scales):
            codes = block.load(vector(I8), block.scaled(part, LANES, right_at[rank] + 4))
            decoded = build.fmul(build.sitofp(codes, vector(F32)), scales)
            right.store(decoded, block.scaled(part, 4 * LANES, 4 * SIDE * rank))

    def decode_row(row: Value) -> None:
        codes = [block.load(I8, build.add(row, I64(at + 4))) for at in left_at]
        factors = [
            block.splat(build.fmul(build.sitofp(code, F32), scale))
            for code, scale in zip(codes, left_scales, strict=True)
        ]

        def decode_part(part: Value) -> None:
            total = None
            for rank, factor in enumerate(factors):
                term = build.fmul(factor, right.load(vector(F32), block.scaled(part, 4 * LANES, 4 * SIDE * rank)))
                total = term if total is None else build.fadd(total, term)
            at = build.add(block.scaled(row, 4 * SIDE), block.scaled(part, 4 * LANES))
            if weighted:
                total = build.fadd(block.target.load(vector(F32), at), build.fmul(total, weights))
            block.store(total, at)

        block.repeat(SIDE // LANES, decode_part)

    block.repeat(SIDE // LANES, decode_right)
    block.repeat(SIDE, decode_row)
