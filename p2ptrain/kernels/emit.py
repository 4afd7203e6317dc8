"""Writing LLVM IR for kernels: types, vectors, memory, loops, and the function around a kernel's blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

LANES = 16
"""Values in a vector. LLVM makes two or four of one where the CPU's registers are shorter."""

I1, I8, I16, I32, I64, I128 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64, 128))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
POINTER = ir.PointerType()
MAGNITUDE_BITS = 0x7FFFFFFF
MAX_PEAK_BITS = 0x7B800000
"""2**120 as fp32: `p2ptrain.codecs.blockwise.MAX_PEAK`."""
MIN_PEAK = 2.0**-100

Value = Any
"""A value of the IR; llvmlite is not annotated."""


class Memory:
    """Bytes from an address on, of any alignment; offsets are numbers or i64 values."""

    def __init__(self, build: Any, address: Value) -> None:
        self._build = build
        self._address = address

    def load(self, kind: Any, offset: Value | int) -> Value:
        """Read a value of this type."""
        return self._build.load(self._at(offset), typ=kind, align=1)

    def store(self, value: Value, offset: Value | int) -> None:
        """Write a value."""
        self._build.store(value, self._at(offset), align=1)

    def _at(self, offset: Value | int) -> Value:
        return self._build.gep(self._address, [I64(offset) if isinstance(offset, int) else offset], source_etype=I8)


class Block:
    """One block's work: vectors and scalars, loops, and memory from the block's source and target on.

    Attributes:
        build: The builder, at the place where code is added.
        source: What is read.
        target: What is written.
        weight: The kernel's last argument, fp32.
    """

    def __init__(self, build: Any, source: Value, target: Value, weight: Value) -> None:
        self.build = build
        self.source = Memory(build, source)
        self.target = Memory(build, target)
        self.weight = weight

    def scratch(self, num_bytes: int) -> Memory:
        """Memory on the stack, the same for all blocks; it holds anything."""
        with self.build.goto_entry_block():
            address = self.build.alloca(ir.ArrayType(I8, num_bytes))
        address.align = 64
        address.type = POINTER  # llvmlite gives it the kind of pointer that LLVM no longer has.
        return Memory(self.build, address)

    def load(self, kind: Any, offset: Value | int) -> Value:
        """Read a value of this type from the source."""
        return self.source.load(kind, offset)

    def store(self, value: Value, offset: Value | int) -> None:
        """Write to the target."""
        self.target.store(value, offset)

    def repeat_while(
        self, start: list[Value], condition: Callable[..., Value], body: Callable[..., list[Value]]
    ) -> list[Value]:
        """A loop that hands on some values; returns them as they are when ``condition`` of them is false.

        Args:
            start: The values at first.
            condition: Of the values, an i1. It is asked before each turn.
            body: From the values before a turn, those after it.
        """
        build = self.build
        before, head, turn, after = build.block, *(build.append_basic_block() for _ in range(3))
        build.branch(head)
        build.position_at_end(head)
        values = [build.phi(value.type) for value in start]
        build.cbranch(condition(*values), turn, after)
        build.position_at_end(turn)
        following = body(*values)
        for phi, first, later in zip(values, start, following, strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(later, build.block)
        build.branch(head)
        build.position_at_end(after)
        return values

    def repeat(self, turns: int, body: Callable[..., list[Value] | None], *start: Value) -> list[Value]:
        """Call ``body`` with an i64 from 0 to ``turns - 1`` and the values that it hands on."""
        _, *values = self.repeat_while(
            [I64(0), *start],
            lambda index, *_: self.build.icmp_signed("<", index, I64(turns)),
            lambda index, *values: [self.build.add(index, I64(1)), *(body(index, *values) or ())],
        )
        return values

    def scaled(self, index: Value, factor: int, offset: int = 0) -> Value:
        """``index * factor + offset``."""
        return self.build.add(self.build.mul(index, I64(factor)), I64(offset))

    def splat(self, value: Value) -> Value:
        """A scalar in all lanes."""
        undefined = ir.Constant(vector(value.type), ir.Undefined)
        first = self.build.insert_element(undefined, value, I32(0))
        return self.build.shuffle_vector(first, undefined, all_lanes(I32, 0))

    def at_least_floor(self, value: Value) -> Value:
        """The larger of an fp32 scalar and 2**-100."""
        floor = F32(MIN_PEAK)
        return self.build.select(self.build.fcmp_ordered(">", value, floor), value, floor)

    def extreme(self, vectors: list[Value], sign: str, intrinsic: str) -> Value:
        """The largest (``>``, ``smax``) or smallest (``<``, ``smin``) i32 of all lanes of all vectors."""
        while len(vectors) > 1:
            rest = vectors[len(vectors) // 2 * 2 :]
            pairs = zip(vectors[::2], vectors[1::2], strict=False)
            vectors = [self.build.select(self.build.icmp_signed(sign, a, b), a, b) for a, b in pairs] + rest
        return self.reduce(intrinsic, vectors[0])

    def reduce(self, intrinsic: str, values: Value) -> Value:
        """One i32 of all lanes: their ``smax``, ``smin`` or sum (``add``)."""
        return self.call(f"llvm.vector.reduce.{intrinsic}.v{LANES}i32", I32, values)

    def call(self, intrinsic: str, result: Any, *arguments: Value) -> Value:
        """Call one of LLVM's intrinsics."""
        module = self.build.module
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.build.call(module.globals.get(intrinsic) or ir.Function(module, kind, intrinsic), arguments)

    def magnitudes(self, num_values: int) -> list[Value]:
        """The bits of the magnitudes of the fp32 values in the source."""
        mask = all_lanes(I32, MAGNITUDE_BITS)
        return [self.build.and_(self.load(vector(I32), 4 * i), mask) for i in range(0, num_values, LANES)]


def vector(kind: Any, lanes: int = LANES) -> Any:
    """The type of so many values."""
    return ir.VectorType(kind, lanes)


def all_lanes(kind: Any, value: float) -> Value:
    """One constant in all lanes."""
    return ir.Constant(vector(kind), [value] * LANES)


def lane_numbers() -> Value:
    """0, 1, 2, ... as i32."""
    return ir.Constant(vector(I32), list(range(LANES)))


@dataclass(frozen=True)
class Kernel:
    """How a kernel moves through its source and target, and what it does with one block of each.

    Attributes:
        source_bytes: Of one block.
        target_bytes: Of one block.
        emit: Adds the code for a block; returns whether the block is refused (i1), or None if none ever is.
    """

    source_bytes: int
    target_bytes: int
    emit: Callable[[Block], Value | None]


def module_of(name: str, kernel: Kernel) -> str:
    """The text of a module that defines the kernel."""
    module = ir.Module(name)
    function = ir.Function(module, ir.FunctionType(I32, [POINTER, POINTER, I64, F32]), name)
    source, target, count, weight = function.args
    entry, loop, done = (function.append_basic_block(label) for label in ("entry", "loop", "done"))
    build = ir.IRBuilder(entry)
    build.cbranch(build.icmp_signed(">", count, I64(0)), loop, done)
    build.position_at_end(loop)
    index, refused = build.phi(I64), build.phi(I32)
    source_block = build.gep(source, [build.mul(index, I64(kernel.source_bytes))], source_etype=I8)
    target_block = build.gep(target, [build.mul(index, I64(kernel.target_bytes))], source_etype=I8)
    found = kernel.emit(Block(build, source_block, target_block, weight))
    after = refused if found is None else build.or_(refused, build.zext(found, I32))
    following = build.add(index, I64(1))
    last = build.block
    build.cbranch(build.icmp_signed("<", following, count), loop, done)
    for phi, start, value in ((index, I64(0), following), (refused, I32(0), after)):
        phi.add_incoming(start, entry)
        phi.add_incoming(value, last)
    build.position_at_end(done)
    result = build.phi(I32)
    result.add_incoming(I32(0), entry)
    result.add_incoming(after, last)
    build.ret(result)
    return str(module)
