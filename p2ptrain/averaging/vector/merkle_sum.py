"""A Merkle tree whose root also vouches for a sum: what a chunk is and what it adds, provable in a few hundred bytes.

Each leaf is the hash of a chunk and its *energy*, the sum of the squares of its values; each inner node the hash of its
two children with both energies, and the energies' sum (the Merkle sum tree of G. Maxwell's proofs of liabilities). So
who signs a root signs the norm of the whole, and cannot misstate it without misstating some chunk's. As in RFC 9162,
section 2.1, leaves and inner nodes are hashed with different keys, so that neither can be passed off as the other; an
odd node moves up unchanged. How many leaves there are, whoever checks a proof has to know.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from itertools import pairwise

from blake3 import blake3

from p2ptrain.hashing import HASH_BYTES

Node = tuple[bytes, float]
"""A hash, `HASH_BYTES` long, and an energy: 0 or more, maybe infinite."""

NODE = struct.Struct(f"<{HASH_BYTES}sd")
MAX_DEPTH = 40
_LEAF_KEY = blake3(b"p2ptrain sum tree: leaf").digest()
_INNER_KEY = blake3(b"p2ptrain sum tree: inner node").digest()


def leaf_hash(chunk: bytes | bytearray | memoryview) -> bytes:
    """The hash of a leaf's bytes."""
    return blake3(chunk, key=_LEAF_KEY).digest()


def leaf_hashes(data: bytes | bytearray | memoryview, ends: Sequence[int]) -> list[bytes]:
    """The hashes of leaves that lie one after the other in ``data``; ``ends`` says where each ends."""
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
    """All nodes over some leaves.

    Attributes:
        root: The topmost node.
    """

    def __init__(self, leaves: Sequence[Node]) -> None:
        """
        Raises:
            ValueError: There are none.
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
        """Number of leaves."""
        return len(self._levels[0])

    def proof(self, index: int) -> bytes:
        """Return a leaf's proof: its energy, then the nodes beside its path to the root, from below."""
        parts = [struct.pack("<d", self._levels[0][index][1])]
        for level in self._levels[:-1]:
            beside = index ^ 1
            if beside < len(level):
                parts.append(NODE.pack(*level[beside]))
            index >>= 1
        return b"".join(parts)


def root_of_proof(leaf: bytes, proof: bytes, index: int, num_leaves: int) -> tuple[Node, float] | None:
    """The root to which a leaf with this hash leads by `SumTree.proof`, and the leaf's energy.

    None when the proof has another length than it must have, or an energy that is none.
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
