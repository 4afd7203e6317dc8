"""Whole chunks of ``topk`` as LLVM IR: the bytes and bits of `p2ptrain.codecs.topk_rows`, where the format is told.

The 64 largest of 4096 magnitudes are found by bisection for a number that just 64 of them reach. A chunk fits a core's
first cache, a pass over it takes some hundred cycles, and 15 passes or so are enough for random values. Where equal
magnitudes leave no such number, bisection goes on for the column before which equals are kept.

A chunk is read several times. Should another thread write to it meanwhile, the bytes mean nothing, but all loops end
and stay within bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llvmlite import ir

from p2ptrain.kernels.emit import (
    F32,
    F64,
    I1,
    I8,
    I16,
    I32,
    I64,
    I128,
    LANES,
    MAGNITUDE_BITS,
    MAX_PEAK_BITS,
    MIN_PEAK,
    Block,
    Kernel,
    Memory,
    Value,
    all_lanes,
    lane_numbers,
    vector,
)

CHUNK = 4096
KEPT = 64
BUCKET = 64
"""Values in a bucket: a bit of a word each."""
BUCKETS_AT, CODES_AT, PLACES_AT, ROW_BYTES = 4, 20, 36, 84
"""Where the fields of an encoded chunk begin, and where it ends."""
MIN_LEVEL_BITS, MAX_LEVEL_BITS = 0x0D80, 0x7B80
"""2**-100 and 2**120 in bf16."""
UNROLLED = 8
"""Vectors in one turn of the loops over a chunk."""

Keeps = Callable[[Value, Value], Value]
"""From bits of magnitudes and their columns, vectors of i32, which of them are meant (i1)."""


def kernels() -> dict[str, Kernel]:
    """The kernels of ``topk`` by their names."""
    return {
        "encode_topk": Kernel(4 * CHUNK, ROW_BYTES, encode),
        "decode_topk": Kernel(ROW_BYTES, 4 * CHUNK, partial(decode, False)),
        "accumulate_topk": Kernel(ROW_BYTES, 4 * CHUNK, partial(decode, True)),
        "validate_topk": Kernel(ROW_BYTES, 0, validate),
    }


def encode(block: Block) -> Value:
    """Encode a chunk; returns whether it is refused."""
    build = block.build
    peak = _largest(block)
    refused = build.icmp_signed(">", peak, I32(MAX_PEAK_BITS))
    # A chunk that is refused is encoded as if it were zeros: what follows takes for granted that values are numbers.
    mask = block.splat(build.select(refused, I32(0), I32(MAGNITUDE_BITS)))
    keeps = _select(block, mask, build.select(refused, I32(0), peak))
    columns, values = block.scratch(4 * KEPT), block.scratch(4 * KEPT)
    block.store(_list_kept(block, mask, keeps, columns, values), BUCKETS_AT)
    bits = [values.load(vector(I32), 4 * i) for i in range(0, KEPT, LANES)]
    high = _write_levels(block, [build.and_(one, mask) for one in bits])
    for part, (one, is_high) in enumerate(zip(bits, high, strict=True)):
        negative = build.icmp_signed("<", one, all_lanes(I32, 0))
        in_turn = ir.Constant(vector(I32, 2 * LANES), [i // 2 + i % 2 * LANES for i in range(2 * LANES)])
        codes = build.bitcast(build.shuffle_vector(negative, is_high, in_turn), I32)
        block.store(codes, CODES_AT + 4 * part)
        block.store(_packed(block, columns.load(vector(I32), 4 * LANES * part)), PLACES_AT + 12 * part)
    return refused


def _over_chunk(block: Block, body: Callable[..., list[Value]], *start: Value) -> list[Value]:
    """Call ``body`` with the offset and the columns of each vector of a chunk, and the values that it hands on."""
    build = block.build

    def turn(index: Value, *values: Value) -> list[Value]:
        carried = list(values)
        for i in range(UNROLLED):
            first = block.scaled(index, LANES * UNROLLED, LANES * i)
            columns = build.add(block.splat(build.trunc(first, I32)), lane_numbers())
            carried = body(build.mul(first, I64(4)), columns, *carried)
        return carried

    return block.repeat(CHUNK // (LANES * UNROLLED), turn, *start)


def _largest(block: Block) -> Value:
    """The bits of the largest magnitude of the chunk."""
    build = block.build

    def larger(at: Value, columns: Value, peaks: Value) -> list[Value]:
        magnitudes = build.and_(block.load(vector(I32), at), all_lanes(I32, MAGNITUDE_BITS))
        return [build.select(build.icmp_signed(">", magnitudes, peaks), magnitudes, peaks)]

    (peaks,) = _over_chunk(block, larger, all_lanes(I32, 0))
    return block.reduce("smax", peaks)


def _select(block: Block, mask: Value, peak: Value) -> Keeps:
    """Which `KEPT` values of the chunk have the largest magnitudes; of equals those in the first columns.

    Args:
        mask: What makes a magnitude of a value.
        peak: The largest of them.
    """
    build = block.build

    def count(keeps: Keeps) -> Value:
        def more(at: Value, columns: Value, found: Value) -> list[Value]:
            kept = keeps(build.and_(block.load(vector(I32), at), mask), columns)
            return [build.sub(found, build.sext(kept, vector(I32)))]

        return block.reduce("add", _over_chunk(block, more, all_lanes(I32, 0))[0])

    def unfinished(low: Value, high: Value, reached: Value) -> Value:
        several = build.icmp_signed(">", build.sub(high, low), I32(1))
        return build.and_(several, build.icmp_signed("!=", reached, I32(KEPT)))

    def halve(low: Value, high: Value, reached: Value) -> list[Value]:
        # `low` is reached by `reached` values, at least 64 of them; `high` by fewer than 64.
        middle = build.add(low, build.lshr(build.sub(high, low), I32(1)))
        limits = block.splat(middle)
        found = count(lambda magnitudes, columns: build.icmp_signed(">=", magnitudes, limits))
        enough = build.icmp_signed(">=", found, I32(KEPT))
        return [
            build.select(enough, middle, low),
            build.select(enough, high, middle),
            build.select(enough, found, reached),
        ]

    limit, _, reached = block.repeat_while(
        [I32(0), build.add(peak, I32(1)), I32(CHUNK)],
        unfinished,
        halve,
    )

    def before(column: Value) -> Keeps:
        ends, limits = block.splat(column), block.splat(limit)
        beyond = build.add(limits, all_lanes(I32, 1))
        return lambda magnitudes, columns: build.icmp_signed(
            ">=", magnitudes, build.select(build.icmp_signed("<", columns, ends), limits, beyond)
        )

    def halve_columns(low: Value, high: Value, column: Value, reached: Value) -> list[Value]:
        column = build.lshr(build.add(low, high), I32(1))
        reached = count(before(column))
        few = build.icmp_signed("<", reached, I32(KEPT))
        return [build.select(few, column, low), build.select(few, high, column), column, reached]

    *_, column, _ = block.repeat_while(
        [I32(0), I32(CHUNK), I32(CHUNK), reached],
        lambda low, high, column, reached: unfinished(low, high, reached),
        halve_columns,
    )
    return before(column)


def _list_kept(block: Block, mask: Value, keeps: Keeps, columns: Memory, values: Memory) -> Value:
    """Write the kept values and their columns, i32 each, in order; returns the field of their buckets, i128.

    Its bits tell how to get from one kept value to the next: 1 for "here is one", 0 for "on to the next bucket". So
    does this loop, a bit a turn.
    """
    build = block.build
    words = block.scratch(8 * (CHUNK // BUCKET + 1))  # One more than is used: a turn reads the word that may be next.

    def mark(at: Value, numbers: Value) -> list[Value]:
        kept = keeps(build.and_(block.load(vector(I32), at), mask), numbers)
        words.store(build.bitcast(kept, I16), build.lshr(at, I64(5)))
        return []

    def step(kept: Value, bucket: Value, word: Value, field: Value) -> list[Value]:
        found = build.icmp_unsigned("!=", word, I64(0))
        place = build.and_(block.call("llvm.cttz.i64", I64, word, I1(0)), I64(BUCKET - 1))
        column = build.add(block.scaled(bucket, BUCKET), place)
        slot = build.shl(kept, I64(2))
        columns.store(build.trunc(column, I32), slot)
        values.store(block.load(I32, build.shl(column, I64(2))), slot)
        position = build.zext(build.add(kept, bucket), I128)
        following = build.add(bucket, I64(1))
        return [
            build.add(kept, build.zext(found, I64)),
            build.select(found, bucket, following),
            build.select(
                found, build.and_(word, build.sub(word, I64(1))), words.load(I64, build.shl(following, I64(3)))
            ),
            build.or_(field, build.shl(build.zext(found, I128), position)),
        ]

    _over_chunk(block, mark)
    *_, field = block.repeat_while(
        [I64(0), I64(0), words.load(I64, 0), I128(0)],
        lambda kept, bucket, *_: build.and_(
            build.icmp_signed("<", kept, I64(KEPT)), build.icmp_signed("<", bucket, I64(CHUNK // BUCKET))
        ),
        step,
    )
    return field


def _ranks(block: Block, magnitudes: list[Value], listed: Memory) -> list[Value]:
    """The place of each magnitude among all in ascending order, the first of equals first.

    Args:
        listed: The magnitudes, too.
    """
    build = block.build

    def compare(index: Value, *ranks: Value) -> list[Value]:
        other, number = block.splat(listed.load(I32, build.shl(index, I64(2)))), block.splat(build.trunc(index, I32))
        found = []
        for i, (own, rank) in enumerate(zip(magnitudes, ranks, strict=True)):
            later = build.icmp_signed("<", number, build.add(lane_numbers(), all_lanes(I32, LANES * i)))
            # As "smaller", or, where the other comes earlier, "smaller or equal".
            smaller = build.icmp_signed("<", other, build.add(own, build.zext(later, vector(I32))))
            found.append(build.sub(rank, build.sext(smaller, vector(I32))))
        return found

    return block.repeat(KEPT, compare, *[all_lanes(I32, 0)] * len(magnitudes))


def _write_levels(block: Block, magnitudes: list[Value]) -> list[Value]:
    """Write the two levels with the least squared error; returns which values have the higher one (vectors of i1)."""
    build = block.build
    unsorted, ordered, sums, places = (block.scratch(size * KEPT) for size in (4, 4, 8, 4))
    for i, some in enumerate(magnitudes):
        unsorted.store(some, 4 * LANES * i)
    ranks = _ranks(block, magnitudes, unsorted)
    for i, some in enumerate(ranks):
        places.store(some, 4 * LANES * i)

    def sort(index: Value) -> list[Value]:
        at = build.shl(index, I64(2))
        ordered.store(unsorted.load(I32, at), build.zext(build.shl(places.load(I32, at), I32(2)), I64))
        return []

    def add_up(index: Value, total: Value) -> list[Value]:
        total = build.fadd(total, build.fpext(ordered.load(F32, build.shl(index, I64(2))), F64))
        sums.store(total, build.shl(index, I64(3)))
        return [total]

    def groups(split: Value, total: Value) -> tuple[Value, Value, Value, Value]:
        """Sum and size of the group that ends with rank ``split``, and of the other."""
        low = sums.load(F64, build.shl(split, I64(3)))
        low_count, high_count = build.add(split, I64(1)), build.sub(I64(KEPT - 1), split)
        return low, build.sitofp(low_count, F64), build.fsub(total, low), build.sitofp(high_count, F64)

    def compare(index: Value, split: Value, best: Value) -> list[Value]:
        low, low_count, high, high_count = groups(index, total)
        score = build.fadd(build.fdiv(build.fmul(low, low), low_count), build.fdiv(build.fmul(high, high), high_count))
        better = build.fcmp_ordered(">", score, best)
        return [build.select(better, index, split), build.select(better, score, best)]

    block.repeat(KEPT, sort)
    (total,) = block.repeat(KEPT, add_up, F64(0.0))
    split, _ = block.repeat(KEPT - 1, compare, I64(0), F64(-1.0))
    low, low_count, high, high_count = groups(split, total)
    block.store(_to_bf16(block, build.fdiv(low, low_count)), 0)
    block.store(_to_bf16(block, build.fdiv(high, high_count)), 2)
    splits = block.splat(build.trunc(split, I32))
    return [build.icmp_signed(">", some, splits) for some in ranks]


def _to_bf16(block: Block, level: Value) -> Value:
    """Round fp64 to fp32 and then to bf16, ties to even; a level below the least one becomes zero."""
    build = block.build
    bits = build.bitcast(build.fptrunc(level, F32), I32)
    odd = build.and_(build.lshr(bits, I32(16)), I32(1))
    rounded = build.lshr(build.add(build.add(bits, I32(0x7FFF)), odd), I32(16))
    return build.trunc(build.select(build.fcmp_ordered("<", level, F64(MIN_PEAK)), I32(0), rounded), I16)


def _packed(block: Block, columns: Value) -> Value:
    """The places of 16 columns within their buckets, 6 bits each, in 12 bytes."""
    build = block.build
    places = build.and_(columns, all_lanes(I32, BUCKET - 1))
    shifted = build.shl(places, ir.Constant(vector(I32), [6 * (i % 4) for i in range(LANES)]))
    fours = [
        build.shuffle_vector(shifted, shifted, ir.Constant(vector(I32, 4), [4 * four + i for four in range(4)]))
        for i in range(4)
    ]
    both = build.or_(build.or_(fours[0], fours[1]), build.or_(fours[2], fours[3]))
    in_bytes = build.bitcast(both, vector(I8, 16))
    return build.shuffle_vector(
        in_bytes, in_bytes, ir.Constant(vector(I32, 12), [4 * (i // 3) + i % 3 for i in range(12)])
    )


def _walk(block: Block, body: Callable[..., list[Value]], *start: Value) -> tuple[Value, list[Value]]:
    """Call ``body`` with each kept value's number and column, i64, and the values that it hands on.

    Columns are within the chunk whatever the bytes are.

    Returns:
        Whether the field of buckets has another number of bits than 64, or leads out of the chunk; and the values.
    """
    build = block.build
    field = block.load(I128, BUCKETS_AT)
    # Of 64 bits the last is for the last bucket at most, unless it is bit 127.
    wrong = build.or_(
        build.icmp_unsigned("!=", block.call("llvm.ctpop.i128", I128, field), I128(KEPT)),
        build.icmp_signed("<", field, I128(0)),
    )
    field = build.select(wrong, I128(2**KEPT - 1), field)

    def step(index: Value, field: Value, *values: Value) -> list[Value]:
        position = build.trunc(block.call("llvm.cttz.i128", I128, field, I1(0)), I64)
        first = build.mul(build.sub(position, index), I64(BUCKET))
        # Two bytes of which the second is the last with bits of this place, so as not to read beyond the chunk.
        bit = block.scaled(index, 6)
        last = build.lshr(build.add(bit, I64(5)), I64(3))
        two = build.zext(block.load(I16, build.add(last, I64(PLACES_AT - 1))), I64)
        place = build.lshr(two, build.sub(build.add(bit, I64(8)), build.shl(last, I64(3))))
        column = build.add(first, build.and_(place, I64(BUCKET - 1)))
        return [build.and_(field, build.sub(field, I128(1))), *body(index, column, *values)]

    _, *values = block.repeat(KEPT, step, field, *start)
    return wrong, values


def decode(weighted: bool, block: Block) -> Value:
    """Overwrite a chunk with the decoded values; or, ``weighted``, add them times the weight.

    Returns whether the chunk is refused; the target then holds anything.
    """
    build = block.build
    low, high = (build.bitcast(build.shl(build.zext(block.load(I16, at), I32), I32(16)), F32) for at in (0, 2))
    if weighted:
        low, high = build.fmul(low, block.weight), build.fmul(high, block.weight)
    else:
        zeros = all_lanes(I32, 0)
        block.repeat(CHUNK // LANES, lambda index: block.store(zeros, block.scaled(index, 4 * LANES)))

    def add(index: Value, column: Value) -> list[Value]:
        four = build.zext(block.load(I8, build.add(build.lshr(index, I64(2)), I64(CODES_AT))), I32)
        code = build.lshr(four, build.trunc(build.shl(build.and_(index, I64(3)), I64(1)), I32))
        is_high = build.trunc(build.lshr(code, I32(1)), I1)
        sign = build.shl(code, I32(31))
        term = build.bitcast(build.xor(build.bitcast(build.select(is_high, high, low), I32), sign), F32)
        at = build.shl(column, I64(2))
        block.store(build.fadd(block.target.load(F32, at), term), at)
        return []

    wrong, _ = _walk(block, add)
    return wrong


def validate(block: Block) -> Value:
    """Whether a chunk is none that an encoder writes."""
    build = block.build

    def compare(index: Value, column: Value, last: Value, falling: Value) -> list[Value]:
        return [column, build.or_(falling, build.icmp_signed("<=", column, last))]

    wrong, (_, falling) = _walk(block, compare, I64(-1), I1(0))
    wrong = build.or_(wrong, falling)
    for at in (0, 2):
        level = build.zext(block.load(I16, at), I32)
        inside = build.and_(
            build.icmp_signed(">=", level, I32(MIN_LEVEL_BITS)), build.icmp_signed("<=", level, I32(MAX_LEVEL_BITS))
        )
        wrong = build.or_(wrong, build.not_(build.or_(inside, build.icmp_signed("==", level, I32(0)))))
    return wrong
