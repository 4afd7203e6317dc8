"""The digest of shared state: a Merkle root over all bits, whose leaves verify a download chunk by chunk.

The little-endian bytes of a sequence of named tensors are cut into chunks of at most 1 MiB (`Cut`). A chunk holds a
run of the vector, together with the optimizer's state for the same values. A shared step that treats each value by
itself needs only the chunk, the mean, and the *common* chunks, such as the number of steps. So the rounds since bring a
stale chunk up to date, whatever the rounds of the other chunks.

As in RFC 9162, section 2.1, leaves and inner nodes have different hash prefixes, so neither can pass as the other. The
digest hashes the tree's root with the names, dtypes and shapes. A leaf hashes the run of the vector and the rest of its
chunk apart: a reader of the vector alone needs 32 bytes of the rest.

::

    digest = H("p2ptrain state 3" | H(description) | tree)
    tree   = inner nodes H(1 | left | right) over leaves; an odd node moves up unchanged
    leaf   = H(0 | H(run of the vector) | H(rest of the chunk))
"""

from __future__ import annotations

import hmac
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Annotated, Any, Literal, cast

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor

from p2ptrain.buffers import Buffer, new_buffer
from p2ptrain.hashing import HASH_BYTES, bulk_hash, canonical_bytes
from p2ptrain.network.schema import Message

CHUNK_BYTES = 1 << 20
"""Limit of a chunk's size."""

BLOCK_VALUES = 256
"""Chunks begin at multiples of this many values."""

BLOCK_SUFFIX = "/256"
"""Suffix of the names of tensors with one element per `BLOCK_VALUES` values."""

ALIGNMENT_BYTES = 64
"""Alignment of tensors that share a buffer."""

MAX_TENSORS = 1 << 20
MAX_STATE_BYTES = 1 << 40

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}

_FLOATS = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}

NamedTensors = Sequence[tuple[str, Tensor]]


class TensorSpec(Message, frozen=True, array_like=True):
    """Name, dtype (as in `DTYPES`) and shape of one tensor of the state."""

    name: Annotated[str, Meta(max_length=1024)]
    dtype: Literal["float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool"]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_STATE_BYTES)], ...], Meta(max_length=16)]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Description(Message, frozen=True):
    """The tensors of a state."""

    tensors: Annotated[tuple[TensorSpec, ...], Meta(min_length=1, max_length=MAX_TENSORS)]

    def __post_init__(self) -> None:
        if len({spec.name for spec in self.tensors}) != len(self.tensors):
            raise ValueError("a tensor is named twice")
        if self.num_bytes > MAX_STATE_BYTES:
            raise ValueError(f"a state of more than {MAX_STATE_BYTES} bytes")

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.tensors)


def specs_of(tensors: NamedTensors) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, cast("Any", str(tensor.dtype).removeprefix("torch.")), tuple(tensor.shape))
        for name, tensor in tensors
    )


def new_tensors(specs: Sequence[TensorSpec]) -> list[tuple[str, Tensor]]:
    """Return zeroed CPU tensors with these specs in one buffer; raise `MemoryError` if they do not fit."""
    aligned = (-(-spec.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for spec in specs)
    *starts, end = accumulate(aligned, initial=0)
    memory = torch.frombuffer(new_buffer(max(end, 1)), dtype=torch.uint8)
    return [
        (spec.name, memory[start : start + spec.num_bytes].view(DTYPES[spec.dtype]).reshape(spec.shape))
        for spec, start in zip(specs, starts, strict=True)
    ]


def byte_view(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes in place; raise `ValueError` unless it is contiguous and on a little-endian CPU."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("only contiguous CPU tensors have bytes that can be hashed and sent")
    if sys.byteorder != "little":
        raise ValueError("shared state is little-endian: this machine's byte order is not supported")
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True)
class _Strided:
    """The values of one tensor's elements: element j belongs to the values from ``start + j * stride`` on."""

    tensor: int
    start: int
    stride: int


class Cut:
    """The cut of tensors into chunks, a function of their specs alone.

    The first tensor is the vector. Other tensors form groups by name without its last part. Each group belongs to one
    run of values, and groups follow each other along the vector. The largest tensors of a group have one element per
    value. A name with `BLOCK_SUFFIX` means one element per block. All others are common to all values, and fill the
    first ``num_common`` chunks. A wrong guess costs no correctness: a download across rounds fails its final check.
    """

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        self.num_bytes = sum(spec.num_bytes for spec in specs)
        sizes = [DTYPES[spec.dtype].itemsize for spec in specs]
        strided, common = _strides(specs)
        self._pieces = _runs([(index, specs[index].num_bytes) for index in common])
        self.num_common = len(self._pieces)
        widths: dict[int, float] = {}
        for each in strided[1:]:
            widths[each.start] = widths.get(each.start, 0.0) + sizes[each.tensor] / each.stride
        width = max(widths.values(), default=0.0) + (sizes[strided[0].tensor] if strided else 0)
        span = BLOCK_VALUES
        while 2 * span * width <= CHUNK_BYTES:
            span *= 2
        ends = [each.start + math.prod(specs[each.tensor].shape) * each.stride for each in strided]
        columns: list[list[tuple[int, int, int]]] = [[] for _ in range(-(-max(ends, default=0) // span))]
        for each in strided:
            count, size = math.prod(specs[each.tensor].shape), sizes[each.tensor]
            first = 0
            for column in range(each.start // span, len(columns)):
                last = min(count, -(-((column + 1) * span - each.start) // each.stride))
                if last > first:
                    columns[column].append((each.tensor, first * size, last * size))
                first = max(first, last)
                if first == count:
                    break
        self._pieces += [column for column in columns if column]
        self.num_chunks = len(self._pieces)

    @property
    def depth(self) -> int:
        return max(0, self.num_chunks - 1).bit_length()

    @cached_property
    def starts(self) -> list[int]:
        """Offsets of the chunks in bytes, laid side by side, and of their end."""
        return list(accumulate(map(self.chunk_bytes, range(self.num_chunks)), initial=0))

    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        if not 0 <= index < self.num_chunks:
            raise ValueError(f"there is no chunk {index} of {self.num_chunks}")
        return self._pieces[index]

    def chunk_bytes(self, index: int) -> int:
        """Return the size of one chunk in bytes; raise `ValueError` if there is no such chunk."""
        return sum(stop - start for _, start, stop in self.pieces(index))

    def run(self, index: int) -> tuple[int, int]:
        """Return the first byte of a chunk's run of the vector, and the one after its last; (0, 0) without a run."""
        tensor, start, stop = self.pieces(index)[0]
        return (0, 0) if tensor else (start, stop)

    def leaf(self, index: int, data: Buffer) -> bytes:
        """Return the hash, 32 bytes, of a chunk's bytes."""
        start, stop = self.run(index)
        view = memoryview(data)
        return leaf_of(view[: stop - start], bulk_hash(view[stop - start :]))


@lru_cache(maxsize=8)
def cut_of(specs: tuple[TensorSpec, ...]) -> Cut:
    return Cut(specs)


def _strides(specs: Sequence[TensorSpec]) -> tuple[list[_Strided], list[int]]:
    """Return the tensors' positions along the vector, the vector first, and the indices of common tensors."""
    counts = [math.prod(spec.shape) for spec in specs]
    largest: dict[str, int] = {}
    for spec, count in zip(specs[1:], counts[1:], strict=True):
        group = spec.name.rpartition(".")[0]
        largest[group] = max(largest.get(group, 0), count)
    starts, end = {}, 0
    for group, count in largest.items():
        starts[group] = end
        end += count
    strided, common = [_Strided(0, 0, 1)] if specs else [], []
    for index, spec in enumerate(specs[1:], start=1):
        group = spec.name.rpartition(".")[0]
        if spec.name.endswith(BLOCK_SUFFIX):
            strided.append(_Strided(index, starts[group], BLOCK_VALUES))
        elif counts[index] == largest[group] and counts[index] > 1:
            strided.append(_Strided(index, starts[group], 1))
        else:
            common.append(index)
    return strided, common


def _runs(sizes: Sequence[tuple[int, int]]) -> list[list[tuple[int, int, int]]]:
    """Cut whole tensors (index, bytes), one after the other, into chunks of `CHUNK_BYTES`."""
    chunks: list[list[tuple[int, int, int]]] = []
    room = 0
    for tensor, num_bytes in sizes:
        at = 0
        while at < num_bytes:
            if not room:
                chunks.append([])
                room = CHUNK_BYTES
            stop = min(num_bytes, at + room)
            chunks[-1].append((tensor, at, stop))
            room -= stop - at
            at = stop
    return chunks


class ChunkedBytes:
    """The bytes of a sequence of tensors in chunks; refers to their memory, copies nothing."""

    def __init__(self, tensors: NamedTensors) -> None:
        self.specs = specs_of(tensors)
        self.cut = cut_of(self.specs)
        self.num_chunks = self.cut.num_chunks
        self._views = [byte_view(tensor) for _, tensor in tensors]

    def pieces(self, index: int) -> list[memoryview]:
        """Return the memory of one chunk in order: one piece per tensor."""
        return [self._views[tensor][start:stop] for tensor, start, stop in self.cut.pieces(index)]

    def read(self, index: int, out: memoryview) -> int:
        """Copy one chunk to the start of ``out``; return its size in bytes."""
        at = 0
        for piece in self.pieces(index):
            out[at : at + len(piece)] = piece
            at += len(piece)
        return at

    def write(self, index: int, data: memoryview) -> None:
        """Overwrite one chunk with ``data``, which has exactly its size."""
        at = 0
        for piece in self.pieces(index):
            piece[:] = data[at : at + len(piece)]
            at += len(piece)

    def leaf(self, index: int) -> tuple[bytes, bytes]:
        """Return the hash of a chunk, and that of its bytes behind its run of the vector; 32 bytes each."""
        pieces, (start, stop) = self.pieces(index), self.cut.run(index)
        run, others = (pieces[0], pieces[1:]) if stop > start else (b"", pieces)
        rest = bulk_hash(*others)
        return leaf_of(run, rest), rest


def is_finite(specs: tuple[TensorSpec, ...], index: int, data: memoryview) -> bool:
    """True if no floating-point value in the bytes of a chunk is NaN or infinite."""
    at = 0
    for tensor, start, stop in cut_of(specs).pieces(index):
        dtype, piece = DTYPES[specs[tensor].dtype], data[at : at + stop - start]
        at += stop - start
        if dtype == torch.bfloat16:  # NumPy has no bfloat16: an exponent of all ones is not finite.
            bits = np.frombuffer(piece, dtype=np.uint16) & 0x7F80
            if bool((bits == 0x7F80).any()):
                return False
        elif dtype.is_floating_point and not bool(np.isfinite(np.frombuffer(piece, dtype=_FLOATS[dtype])).all()):
            return False
    return True


@dataclass(frozen=True)
class MerkleTree:
    """The digest of named tensors.

    Attributes:
        root: The digest, 32 bytes.
        levels: The hashes of each level, those of the chunks first; 32 bytes each.
        rests: The hash of each chunk's bytes behind its run of the vector, 32 bytes each.
    """

    root: bytes
    levels: list[list[bytes]] = field(repr=False)
    rests: list[bytes] = field(repr=False)

    def proof(self, index: int) -> bytes:
        """Return the siblings from one chunk's leaf to the root: 32 bytes a level, zeros for a missing sibling."""
        found = []
        for level in self.levels[:-1]:
            sibling = index ^ 1
            found.append(level[sibling] if sibling < len(level) else bytes(HASH_BYTES))
            index //= 2
        return b"".join(found)


def merkle_tree(tensors: NamedTensors) -> MerkleTree:
    """Hash all ``tensors`` in place; raise `ValueError` unless they are contiguous, on a little-endian CPU."""
    return tree_of(ChunkedBytes(tensors))


def tree_of(chunks: ChunkedBytes) -> MerkleTree:
    hashes = [chunks.leaf(index) for index in range(chunks.num_chunks)]
    levels = [[leaf for leaf, _ in hashes]]
    while len(level := levels[-1]) > 1:
        above = [bulk_hash(b"\x01", level[at], level[at + 1]) for at in range(0, len(level) - 1, 2)]
        levels.append(above + level[len(above) * 2 :])
    return MerkleTree(_root(description_hash(chunks.specs), levels[-1]), levels, [rest for _, rest in hashes])


def description_hash(specs: Sequence[TensorSpec]) -> bytes:
    return bulk_hash(canonical_bytes([[spec.name, spec.dtype, list(spec.shape), spec.num_bytes] for spec in specs]))


def leaf_of(run: Buffer, rest: bytes) -> bytes:
    """Return the hash, 32 bytes, of a chunk with this run of the vector; ``rest`` is the hash of its other bytes."""
    return bulk_hash(b"\x00", bulk_hash(run), rest)


def proves(
    description: bytes, leaf: bytes, index: int, num_chunks: int, proof: bytes | memoryview, root: bytes
) -> bool:
    """True if a proof, of the right length, leads from a chunk's ``leaf`` to the digest ``root``.

    ``description`` is the `description_hash` of the tensors.
    """
    node, size, at = leaf, num_chunks, 0
    while size > 1:
        if (index ^ 1) < size:
            sibling = bytes(proof[at : at + HASH_BYTES])
            node = bulk_hash(b"\x01", sibling, node) if index & 1 else bulk_hash(b"\x01", node, sibling)
        at += HASH_BYTES
        index //= 2
        size = -(-size // 2)
    return hmac.compare_digest(_root(description, [node]), root)


def _root(description: bytes, top: Sequence[bytes]) -> bytes:
    return bulk_hash(b"p2ptrain state 3", description, *top)
