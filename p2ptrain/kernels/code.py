"""The codecs' inner loops as LLVM IR.

A kernel has the C signature ``int kernel(const void *source, void *target, long count, float weight)``. It works on
``count`` whole blocks, on memory of any alignment, in one pass, 16 values at a time; an encoder or validator returns 1
when it met a block to refuse, and everything else 0. What it computes are exactly the operations of the codec's torch
or NumPy code in their order: no fast-math flag is set, and without one LLVM fuses no multiply and add. Four tricks, all
exact:

* The bits of ``|x|`` order like ``|x|``, with infinity and NaN on top: an integer maximum finds a block's peak, faster
  than one of floats, and comparing it with the bits of a limit refuses what is not finite, too.
* Flip the bits below the sign of negative numbers, and all floats order like their bits: that finds minima.
* ``x + 1.5 * 2**23`` rounds ``|x| < 2**22`` to the nearest whole number, halves to even, and leaves it in the low bits.
* bfloat16 is the upper half of fp32: adding 0x7fff, and 1 where that half is odd, rounds to nearest, halves to even.

Here are the kernels of codecs with blocks of a scale and of those with none; `topk` and `energy` have the
others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from p2ptrain.kernels import energy, topk
from p2ptrain.kernels.emit import (
    F16,
    F32,
    I8,
    I16,
    I32,
    LANES,
    MAX_PEAK_BITS,
    Block,
    Kernel,
    Value,
    all_lanes,
    vector,
)

ROUNDER = 1.5 * 2.0**23
INFINITY_BITS = 0x7F800000
FP16_LIMIT_BITS = 0x477FF000
"""65520 as fp32, half-way between the largest half and infinity."""
BF16_LIMIT_BITS = 0x7F7F8000
"""The smallest fp32 that rounds to infinity in bfloat16."""


def _ordered(block: Block, bits: Value) -> Value:
    """Bits of fp32 to i32 in the same order, or back; scalars or vectors."""
    build = block.build
    one, last = (I32(1), I32(31)) if bits.type == I32 else (all_lanes(I32, 1), all_lanes(I32, 31))
    return build.xor(bits, build.lshr(build.ashr(bits, last), one))


def _codes(block: Block, values: Value, factor: Value) -> Value:
    """``round_half_even(values * factor)`` in the low bits of i32 lanes; magnitudes below 2**22."""
    build = block.build
    rounded = build.fadd(build.fmul(values, factor), all_lanes(F32, ROUNDER))
    return build.bitcast(rounded, vector(I32))


@dataclass(frozen=True)
class Width:
    """How codes lie in a block; see `p2ptrain.codecs.blockwise`.

    Attributes:
        bits: 8, or 4: then the values of a block's first half are in the low halves of bytes.
        values: Values in a block.
        affine: Whether a block has a minimum after its scale, and codes that count from it.
    """

    bits: int
    values: int
    affine: bool

    @property
    def levels(self) -> float:
        """The largest code."""
        return float(2**self.bits - 1 if self.affine else 2 ** (self.bits - 1) - 1)

    @property
    def header_bytes(self) -> int:
        """Bytes before the codes."""
        return 8 if self.affine else 4

    @property
    def block_bytes(self) -> int:
        """Bytes of an encoded block."""
        return self.header_bytes + self.values * self.bits // 8


def encode_block(width: Width, block: Block) -> Value:
    """Quantise a block; returns whether it is refused."""
    build = block.build
    if width.affine:
        ordered = [_ordered(block, block.load(vector(I32), 4 * i)) for i in range(0, width.values, LANES)]
        low_bits, high_bits = block.extreme(ordered, "<", "smin"), block.extreme(ordered, ">", "smax")
        low, high = (build.bitcast(_ordered(block, bits), F32) for bits in (low_bits, high_bits))
        low = build.fadd(low, F32(0.0))  # Of zeros of both signs this makes +0.
        peak = build.fsub(high, low)
        refused = build.or_(
            build.icmp_signed(">", high_bits, I32(MAX_PEAK_BITS)),
            build.icmp_signed("<", low_bits, I32(~MAX_PEAK_BITS)),  # `_ordered` of the bits of -2**120
        )
        block.store(low, 4)
        lows = block.splat(low)
    else:
        bits = block.extreme(block.magnitudes(width.values), ">", "smax")
        peak = build.bitcast(bits, F32)
        refused = build.icmp_signed(">", bits, I32(MAX_PEAK_BITS))
        lows = None
    floored = block.at_least_floor(peak)
    zero = build.fcmp_ordered("==", peak, F32(0.0))
    block.store(build.select(zero, F32(0.0), build.fdiv(floored, F32(width.levels))), 0)
    factor = block.splat(build.fdiv(F32(width.levels), floored))

    def codes(first: int) -> Value:
        values = block.load(vector(F32), 4 * first)
        return _codes(block, values if lows is None else build.fsub(values, lows), factor)

    if width.bits == 8:
        for i in range(0, width.values, LANES):
            block.store(build.trunc(codes(i), vector(I8)), width.header_bytes + i)
        return refused
    half = width.values // 2
    for i in range(0, half, LANES):
        pair = [codes(i), codes(half + i)]
        if not width.affine:
            pair = [build.add(code, all_lanes(I32, 8)) for code in pair]
        low_half, high_half = (build.and_(code, all_lanes(I32, 15)) for code in pair)
        both = build.or_(low_half, build.shl(high_half, all_lanes(I32, 4)))
        block.store(build.trunc(both, vector(I8)), width.header_bytes + i)
    return refused


def decode_block(width: Width, weighted: bool, block: Block) -> None:
    """Overwrite with the decoded values; or, ``weighted``, add them times the weight."""
    build = block.build
    scale = block.load(F32, 0)
    scales = block.splat(build.fmul(scale, block.weight) if weighted else scale)
    lows = None
    if width.affine:
        low = block.load(F32, 4)
        lows = block.splat(build.fmul(low, block.weight) if weighted else low)

    def write(codes: Value, first: int) -> None:
        decoded = build.fmul(build.sitofp(codes, vector(F32)), scales)
        if lows is not None:
            decoded = build.fadd(decoded, lows)
        if weighted:
            decoded = build.fadd(block.target.load(vector(F32), 4 * first), decoded)
        block.store(decoded, 4 * first)

    if width.bits == 8:
        for i in range(0, width.values, LANES):
            codes = block.load(vector(I8), width.header_bytes + i)
            write((build.zext if width.affine else build.sext)(codes, vector(I32)), i)
        return
    half = width.values // 2
    for i in range(0, half, LANES):
        both = build.zext(block.load(vector(I8), width.header_bytes + i), vector(I32))
        for first, codes in (
            (i, build.and_(both, all_lanes(I32, 15))),
            (half + i, build.lshr(both, all_lanes(I32, 4))),
        ):
            write(codes if width.affine else build.sub(codes, all_lanes(I32, 8)), first)


def square_block(width: Width, block: Block) -> None:
    """Add up the squares of a block's codes, which fit 23 bits; one i32."""
    build = block.build
    total = all_lanes(I32, 0)
    for i in range(0, width.values * width.bits // 8, LANES):
        loaded = block.load(vector(I8), width.header_bytes + i)
        codes = [build.sext(loaded, vector(I32))]
        if width.bits == 4:
            both = build.zext(loaded, vector(I32))
            halves = build.and_(both, all_lanes(I32, 15)), build.lshr(both, all_lanes(I32, 4))
            codes = [build.sub(half, all_lanes(I32, 8)) for half in halves]
        for code in codes:
            total = build.add(total, build.mul(code, code))
    block.store(block.reduce("add", total), 0)


DENSE_VALUES = 128
"""Values in a block of the formats that have no blocks of their own: eight vectors, so that loops are worth it."""


def encode_dense(name: str, limit_bits: int, block: Block) -> Value:
    """Convert a block; returns whether it holds a magnitude of ``limit_bits`` or more."""
    build = block.build
    for i in range(0, DENSE_VALUES, LANES):
        if name == "fp16":
            block.store(build.fptrunc(block.load(vector(F32), 4 * i), vector(F16)), 2 * i)
            continue
        bits = block.load(vector(I32), 4 * i)
        if name == "fp32":
            block.store(bits, 4 * i)
            continue
        odd = build.and_(build.lshr(bits, all_lanes(I32, 16)), all_lanes(I32, 1))
        rounded = build.add(build.add(bits, all_lanes(I32, 0x7FFF)), odd)
        block.store(build.trunc(build.lshr(rounded, all_lanes(I32, 16)), vector(I16)), 2 * i)
    peak = block.extreme(block.magnitudes(DENSE_VALUES), ">", "smax")
    return build.icmp_signed(">=", peak, I32(limit_bits))


def decode_dense(name: str, weighted: bool, block: Block) -> None:
    """Overwrite with the converted values; or, ``weighted``, add them times the weight."""
    build = block.build
    weights = block.splat(block.weight)
    for i in range(0, DENSE_VALUES, LANES):
        if name == "fp32":
            decoded = block.load(vector(F32), 4 * i)
        elif name == "fp16":
            decoded = build.fpext(block.load(vector(F16), 2 * i), vector(F32))
        else:
            bits = build.zext(block.load(vector(I16), 2 * i), vector(I32))
            decoded = build.bitcast(build.shl(bits, all_lanes(I32, 16)), vector(F32))
        if weighted:
            decoded = build.fadd(block.target.load(vector(F32), 4 * i), build.fmul(decoded, weights))
        block.store(decoded, 4 * i)


def validate_dense(name: str, block: Block) -> Value:
    """Whether an encoded block holds a number that is not finite."""
    build = block.build
    if name == "fp32":
        return build.icmp_signed(">=", block.extreme(block.magnitudes(DENSE_VALUES), ">", "smax"), I32(INFINITY_BITS))
    mask = all_lanes(I32, 0x7FFF)
    magnitudes = [
        build.and_(build.zext(block.load(vector(I16), 2 * i), vector(I32)), mask) for i in range(0, DENSE_VALUES, LANES)
    ]
    infinity = 0x7C00 if name == "fp16" else 0x7F80
    return build.icmp_signed(">=", block.extreme(magnitudes, ">", "smax"), I32(infinity))


def kernels() -> dict[str, Kernel]:
    """All kernels by their names: ``<operation>_<codec>``."""
    found = {**topk.kernels(), **energy.kernels()}
    for bits, values in ((8, 256), (4, 128)):
        for affine in (False,):
            width = Width(bits, values, affine)
            name, encoded = f"int{bits}{'a' if affine else ''}", width.block_bytes
            found[f"encode_{name}"] = Kernel(4 * values, encoded, partial(encode_block, width))
            found[f"decode_{name}"] = Kernel(encoded, 4 * values, partial(decode_block, width, False))
            found[f"accumulate_{name}"] = Kernel(encoded, 4 * values, partial(decode_block, width, True))
            if not affine:
                found[f"squares_{name}"] = Kernel(encoded, 4, partial(square_block, width))
    for name, size, limit in (
        ("fp32", 4, INFINITY_BITS), ("fp16", 2, FP16_LIMIT_BITS), ("bf16", 2, BF16_LIMIT_BITS)
    ):  # fmt: skip
        raw, encoded = 4 * DENSE_VALUES, size * DENSE_VALUES
        found[f"encode_{name}"] = Kernel(raw, encoded, partial(encode_dense, name, limit))
        found[f"accumulate_{name}"] = Kernel(encoded, raw, partial(decode_dense, name, True))
        found[f"validate_{name}"] = Kernel(encoded, 0, partial(validate_dense, name))
        if name != "fp32":  # Of which decoding is a copy.
            found[f"decode_{name}"] = Kernel(encoded, raw, partial(decode_dense, name, False))
    return found
