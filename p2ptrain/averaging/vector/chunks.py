"""Pieces and chunks of a share: where they are cut, how they are checked, and the Merkle sum tree over the chunks.

A *piece* is the unit of work: encode, send, check, reduce. A *chunk* is the unit of hashes, commitments and audits. The
root of a *Merkle sum tree* commits to the bytes of all chunks and to the sum of their energies. A leaf is the hash of a
chunk and its *energy*, the sum of its squared values. An inner node holds the hash of its two
children, energies included, and the sum of those energies (G. Maxwell's proofs of liabilities). So a peer that signs a
root signs the norm of the whole: to misstate it, the peer must misstate a chunk's energy.

As in RFC 9162, section 2.1, leaves and inner nodes are hashed in separate domains, here by different keys. An odd node
moves up unchanged. A verifier must know the number of leaves.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import pairwise

from blake3 import blake3

from p2ptrain.buffers import Buffer
from p2ptrain.codecs import Codec, CodecError, Decoder, PartList
from p2ptrain.hashing import EMPTY_HASH, HASH_BYTES, BulkHasher, bulk_hash
from p2ptrain.manifest import AveragingSpec

PIECE_VALUES = 1 << 20
"""Length of a piece: long enough to hide the cost of a thread switch, short enough to overlap with the network."""


def cut(num_values: int, block_size: int, piece_values: int = PIECE_VALUES) -> list[tuple[int, int]]:
    """Return (start, stop) of each piece of a share, cut at multiples of ``block_size``."""
    step = max(block_size, piece_values // block_size * block_size)
    return [(low, min(low + step, num_values)) for low in range(0, num_values, step)]


CHUNK_VALUES = 1 << 14
"""Base length of a chunk; see `chunk_values`. Equal for all members, because ``centered_clip`` takes distances per
chunk. Shorter chunks cost more to hash, longer ones more to reveal in an audit."""


def chunk_values(codec: Codec) -> int:
    """Return the number of values in a chunk.

    Chunk k of every part and of the mean covers the same values, whatever their codecs. The mean's chunk depends on
    the parts' chunks alone: no codec block and no input of a rule crosses a chunk border.
    """
    return math.lcm(CHUNK_VALUES, codec.block_size)


def num_chunks(num_values: int, chunk: int) -> int:
    return -(-num_values // chunk)


def chunk_span(low: int, high: int, number: int, chunk: int) -> tuple[int, int]:
    """Return (start, stop) of chunk ``number`` of the share ``[low, high)``."""
    first = low + number * chunk
    return first, min(first + chunk, high)


def mean_root(codec: Decoder, mean: Buffer, num_values: int, chunk: int) -> bytes:
    """Return the digest that identifies an encoded mean: its `mean_tree` root, or the hash of a list of parts."""
    return bulk_hash(mean) if isinstance(codec, PartList) else mean_tree(codec, mean, num_values, chunk).root[0]


def mean_tree(codec: Decoder, mean: Buffer, num_values: int, chunk: int) -> SumTree:
    """Return the hash tree over the chunks of an encoded mean of at least one value; all energies are zero."""
    ends = [codec.encoded_bytes(high) for _, high in cut(num_values, chunk, chunk)]
    return SumTree([(leaf, 0.0) for leaf in leaf_hashes(mean, ends)])


Node = tuple[bytes, float]
"""Hash of `HASH_BYTES` bytes, and energy in [0, inf]."""
NODE = struct.Struct(f"<{HASH_BYTES}sd")
MAX_DEPTH = 40
_LEAF_KEY = blake3(b"p2ptrain sum tree: leaf").digest()
_INNER_KEY = blake3(b"p2ptrain sum tree: inner node").digest()


def leaf_hash(chunk: bytes | bytearray | memoryview) -> bytes:
    return blake3(chunk, key=_LEAF_KEY).digest()


def leaf_hashes(data: bytes | bytearray | memoryview, ends: Sequence[int]) -> list[bytes]:
    """Return the hashes of consecutive leaves in ``data``, which end at the offsets ``ends``."""
    return _hashes(data, ends, _LEAF_KEY)


def _hashes(data: bytes | bytearray | memoryview, ends: Sequence[int], key: bytes) -> list[bytes]:
    view, hasher, hashes = memoryview(data), blake3(key=key), []
    for start, end in pairwise((0, *ends)):
        hasher.reset()
        hasher.update(view[start:end])
        hashes.append(hasher.digest())
    return hashes


def _parent(left: Node, right: Node) -> Node:
    return blake3(NODE.pack(*left) + NODE.pack(*right), key=_INNER_KEY).digest(), left[1] + right[1]


class SumTree:
    """All nodes of a Merkle sum tree over at least one leaf."""

    def __init__(self, leaves: Sequence[Node]) -> None:
        if not leaves:
            raise ValueError("a tree needs a leaf")
        self._levels = [list(leaves)]
        while len(level := self._levels[-1]) > 1:
            pairs = len(level) // 2
            packed = b"".join([NODE.pack(*node) for node in level[: 2 * pairs]])
            hashes = _hashes(packed, range(2 * NODE.size, len(packed) + 1, 2 * NODE.size), _INNER_KEY)
            energies = [level[at][1] + level[at + 1][1] for at in range(0, 2 * pairs, 2)]
            self._levels.append([*zip(hashes, energies, strict=True), *level[2 * pairs :]])
        self.root = self._levels[-1][0]

    def __len__(self) -> int:
        return len(self._levels[0])

    def proof(self, index: int) -> bytes:
        """Return a leaf's inclusion proof: its energy, then the siblings on its path, from the leaf to the root."""
        parts = [struct.pack("<d", self._levels[0][index][1])]
        for level in self._levels[:-1]:
            beside = index ^ 1
            if beside < len(level):
                parts.append(NODE.pack(*level[beside]))
            index >>= 1
        return b"".join(parts)


def root_of_proof(leaf: bytes, proof: bytes, index: int, num_leaves: int) -> tuple[Node, float] | None:
    """Return the root implied by a leaf's hash and its `SumTree.proof`, and the leaf's energy.

    None if the index is out of range, the proof has the wrong length, or an energy is NaN or has a negative sign.
    """
    if not 0 <= index < num_leaves or len(proof) < 8 or (len(proof) - 8) % NODE.size:
        return None
    energy: float = struct.unpack_from("<d", proof)[0]
    beside = list(NODE.iter_unpack(proof[8:]))
    if not all(value >= 0.0 and math.copysign(1.0, value) > 0 for value in (energy, *(e for _, e in beside))):
        return None
    node, width = (leaf, energy), num_leaves
    while width > 1:
        if index ^ 1 < width:
            if not beside:
                return None
            other = beside.pop(0)
            node = _parent(node, other) if index % 2 == 0 else _parent(other, node)
        index, width = index >> 1, (width + 1) >> 1
    return None if beside else (node, energy)


RANGE_SLACK = 1.01
"""Factor by which encoded values may exceed ``max_value``, because a codec may round up."""


class RangeCheck:
    """Refuses pieces of an encoded share that are malformed or hold values beyond the manifest's ``max_value``."""

    def __init__(self, codec: Decoder, spec: AveragingSpec) -> None:
        self.codec = codec
        self._max_value = spec.max_value

    def __call__(self, piece: memoryview, low: int, high: int) -> None:
        """Raise `CodecError` unless the values ``[low, high)`` of the share are well-formed, finite and in range."""
        codec = self.codec.part(low, high)
        codec.validate(piece, high - low)
        check_range(codec.largest(piece, high - low), self._max_value * RANGE_SLACK)


class PartCheck(RangeCheck):
    """A `RangeCheck` that also hashes and measures each chunk; the pieces must come in order.

    Attributes:
        leaves: Hash and energy of each chunk so far: `EMPTY_HASH` unless ``hashed``, 0 unless ``measured``.
    """

    codec: Codec

    def __init__(self, codec: Codec, spec: AveragingSpec, chunk: int, *, measured: bool, hashed: bool) -> None:
        super().__init__(codec, spec)
        self._chunk = chunk
        self._measured = measured
        self._hashed = hashed
        self.leaves: list[Node] = []

    def __call__(self, piece: memoryview, low: int, high: int) -> None:
        super().__call__(piece, low, high)
        self.measure(piece, low, high)

    def measure(self, piece: memoryview, low: int, high: int) -> None:
        """Hash and measure the chunks of a piece that was checked before."""
        if not (self._measured or self._hashed):
            return
        codec = self.codec.part(low, high)
        spans = cut(high - low, self._chunk, self._chunk)
        energies, hashes = [0.0] * len(spans), [EMPTY_HASH] * len(spans)
        if self._measured:
            energies = codec.squared_norms(piece, high - low, self._chunk)
        if self._hashed:
            hashes = leaf_hashes(piece, [codec.encoded_bytes(last) for _, last in spans])
        self.leaves += zip(hashes, energies, strict=True)


class ListCheck(RangeCheck):
    """A `RangeCheck` that also hashes a mean that lists its parts; the pieces must come in order."""

    def __init__(self, codec: Decoder, spec: AveragingSpec) -> None:
        super().__init__(codec, spec)
        self._hasher = BulkHasher()

    def __call__(self, piece: memoryview, low: int, high: int) -> None:
        super().__call__(piece, low, high)
        self._hasher.update(piece)

    @property
    def root(self) -> bytes:
        """The mean's `mean_root`."""
        return self._hasher.digest()


def check_range(largest: float, limit: float) -> None:
    """Raise `CodecError` if the largest magnitude is NaN or above the limit."""
    if not largest <= limit:
        raise CodecError(f"a value of magnitude {largest:.3g} is beyond the manifest's averaging.max_value")
