"""Merkle sum tree: its root commits to the bytes of all chunks and to the sum of their energies.

A leaf is the hash of a chunk and its *energy*, the sum of its squared values. An inner node holds the hash of its two
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

from p2ptrain.hashing import HASH_BYTES

Node = tuple[bytes, float]
"""Hash of `HASH_BYTES` bytes, and energy in [0, inf]."""

NODE = struct.Struct(f"<{HASH_BYTES}sd")
MAX_DEPTH = 40
_LEAF_KEY = blake3(b"p2ptrain sum tree: leaf").digest()
_INNER_KEY = blake3(b"p2ptrain sum tree: inner node").digest()


def leaf_hash(chunk: bytes | bytearray | memoryview) -> bytes:
    """Return the hash of a leaf's bytes."""
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
    """All nodes of a Merkle sum tree."""

    def __init__(self, leaves: Sequence[Node]) -> None:
        """
        Raises:
            ValueError: ``leaves`` is empty.
        """
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
        """Return the number of leaves."""
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

    Returns:
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
