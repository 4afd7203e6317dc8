"""The digest of shared state: a Merkle root that names every bit, and whose leaves verify a download piece by piece.

The bytes (little endian) of a sequence of named tensors are taken as one string and cut into chunks of 1 MiB; a chunk
may span tensors. As in RFC 9162, section 2.1, leaves and inner nodes are hashed with different prefixes, so that
neither can be passed off as the other. The digest hashes the tree's root with the names, dtypes and shapes.

::

    digest = H("p2ptrain state 1" | H(description) | tree)
    tree   = inner nodes H(1 | left | right) over leaves H(0 | chunk); an odd node moves up unchanged
"""

from __future__ import annotations

import bisect
import hmac
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from p2ptrain.buffers import new_buffer
from p2ptrain.errors import IntegrityError
from p2ptrain.hashing import bulk_hash
from p2ptrain.manifest import canonical_bytes

CHUNK_BYTES = 1 << 20

ALIGNMENT_BYTES = 64
"""Where tensors that share a buffer may start."""

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

NamedTensors = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype (as in `DTYPES`) and shape of one tensor of the state."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def to_list(self) -> list[Any]:
        """Plain values for the wire: name, dtype, shape, bytes."""
        return [self.name, self.dtype, list(self.shape), self.num_bytes]


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """Describe ``tensor``."""
    return TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def specs_from_wire(values: Any) -> tuple[TensorSpec, ...]:
    """Check and rebuild a list of `TensorSpec.to_list` that came from a peer.

    Raises:
        IntegrityError: It is malformed, names a tensor twice, or describes more than `MAX_STATE_BYTES`.
    """
    specs: list[TensorSpec] = []
    total = 0
    if not isinstance(values, list) or not 0 < len(values) <= MAX_TENSORS:
        raise IntegrityError("a description of tensors is malformed: the peer that sent it is broken or hostile")
    for value in values:
        if not isinstance(value, list) or len(value) != 4:
            raise IntegrityError("a description of a tensor is malformed: the peer that sent it is broken or hostile")
        name, dtype, shape, num_bytes = value
        valid = (
            isinstance(name, str)
            and len(name) <= 1024
            and isinstance(dtype, str)
            and dtype in DTYPES
            and isinstance(shape, list)
            and len(shape) <= 16
            and all(type(size) is int and 0 <= size <= MAX_STATE_BYTES for size in shape)
        )
        spec = TensorSpec(name, dtype, tuple(shape)) if valid else None
        total += spec.num_bytes if spec is not None else 0
        if spec is None or num_bytes != spec.num_bytes or total > MAX_STATE_BYTES:
            raise IntegrityError(
                "a description of a tensor is out of range: the peer that sent it is broken or hostile"
            )
        specs.append(spec)
    if len({spec.name for spec in specs}) != len(specs):
        raise IntegrityError("a description names a tensor twice: the peer that sent it is broken or hostile")
    return tuple(specs)


def new_tensors(specs: Sequence[TensorSpec]) -> list[tuple[str, Tensor]]:
    """Zeroed CPU tensors with these specs, side by side in memory; raises `MemoryError` when there is not so much."""
    starts, end = [], 0
    for spec in specs:
        starts.append(end)
        end += -(-spec.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    memory = torch.frombuffer(new_buffer(max(end, 1)), dtype=torch.uint8)
    return [
        (spec.name, memory[start : start + spec.num_bytes].view(DTYPES[spec.dtype]).reshape(spec.shape))
        for spec, start in zip(specs, starts, strict=True)
    ]


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of ``tensor`` (CPU, contiguous) as they lie in memory, writable and without a copy.

    Raises:
        ValueError: The tensor is elsewhere or not contiguous, or the machine is big-endian.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("only contiguous CPU tensors have bytes that can be hashed and sent")
    if sys.byteorder != "little":
        raise ValueError("shared state is little-endian: this machine's byte order is not supported")
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class ChunkedBytes:
    """The bytes of a sequence of tensors as one string in chunks; refers to their memory, copies nothing.

    Attributes:
        specs: What the tensors are.
        num_bytes: Length of the string.
        num_chunks: How many chunks it has; all but the last have `CHUNK_BYTES`.
    """

    def __init__(self, tensors: NamedTensors) -> None:
        self.specs = tuple(spec_of(name, tensor) for name, tensor in tensors)
        self._views = [byte_view(tensor) for _, tensor in tensors]
        self._ends: list[int] = []
        end = 0
        for view in self._views:
            end += len(view)
            self._ends.append(end)
        self.num_bytes = end
        self.num_chunks = num_chunks(end)

    def chunk_bytes(self, index: int) -> int:
        """Size of one chunk."""
        return chunk_size(index, self.num_bytes)

    def pieces(self, index: int) -> list[memoryview]:
        """The memory of one chunk, in order: one piece for each tensor that it touches."""
        start = index * CHUNK_BYTES
        end = start + self.chunk_bytes(index)
        pieces = []
        at = bisect.bisect_right(self._ends, start)
        while start < end:
            base = self._ends[at] - len(self._views[at])
            stop = min(end, self._ends[at])
            if stop > start:
                pieces.append(self._views[at][start - base : stop - base])
            start = max(start, stop)
            at += 1
        return pieces

    def read(self, index: int, out: memoryview) -> int:
        """Copy one chunk to the start of ``out``; returns its size in bytes."""
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

    def leaf(self, index: int) -> bytes:
        """The hash of one chunk, 32 bytes."""
        return _leaf(self.pieces(index))


@dataclass(frozen=True)
class MerkleTree:
    """The digest of named tensors, and the hashes of their chunks that it vouches for.

    Attributes:
        leaves: The hash of each chunk, 32 bytes each.
        root: The digest, 32 bytes.
    """

    leaves: tuple[bytes, ...]
    root: bytes


def num_chunks(num_bytes: int) -> int:
    """How many chunks a string of ``num_bytes`` has."""
    return -(-num_bytes // CHUNK_BYTES)


def chunk_size(index: int, num_bytes: int) -> int:
    """Bytes of chunk ``index`` of a string of ``num_bytes``; raises `ValueError` when there is no such chunk."""
    if not 0 <= index < num_chunks(num_bytes):
        raise ValueError(f"there is no chunk {index} in {num_bytes} bytes")
    return min(CHUNK_BYTES, num_bytes - index * CHUNK_BYTES)


def merkle_tree(tensors: NamedTensors) -> MerkleTree:
    """Hash all ``tensors`` (CPU, contiguous) where they lie.

    Raises:
        ValueError: A tensor is elsewhere or not contiguous.
    """
    chunks = ChunkedBytes(tensors)
    leaves = tuple(chunks.leaf(index) for index in range(chunks.num_chunks))
    return MerkleTree(leaves, root_of(chunks.specs, leaves))


def root_of(specs: Sequence[TensorSpec], leaves: Sequence[bytes]) -> bytes:
    """The digest, 32 bytes, of tensors with these specs whose chunks have these hashes."""
    level = list(leaves)
    while len(level) > 1:
        pairs = range(0, len(level) - 1, 2)
        above = [bulk_hash(b"\x01", level[at], level[at + 1]) for at in pairs]
        level = above + level[len(above) * 2 :]
    description = bulk_hash(canonical_bytes([spec.to_list() for spec in specs]))
    return bulk_hash(b"p2ptrain state 1", description, *level)


def verify_chunk(index: int, data: bytes | bytearray | memoryview, leaves: Sequence[bytes]) -> bool:
    """Whether ``data`` is the chunk ``index`` that ``leaves`` vouch for."""
    return 0 <= index < len(leaves) and hmac.compare_digest(_leaf([data]), leaves[index])


def _leaf(pieces: Sequence[bytes | bytearray | memoryview]) -> bytes:
    return bulk_hash(b"\x00", *pieces)
