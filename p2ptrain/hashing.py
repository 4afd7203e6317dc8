"""The hash of bulk data, BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs), and the bytes of values to be hashed.

Every byte of every round and download is hashed at least once, and BLAKE3 is several times faster than SHA-256.
Identities, manifests and signed messages are small and use SHA-256.
"""

from __future__ import annotations

from typing import Any

import msgpack
from blake3 import blake3

HASH_BYTES = 32
EMPTY_HASH = blake3(b"").digest()

BulkHasher = blake3
"""An incremental hash: ``update`` (releases the GIL for large buffers) and ``digest``, `HASH_BYTES` long."""


def bulk_hash(*pieces: bytes | bytearray | memoryview) -> bytes:
    """Return the hash, `HASH_BYTES` long, of the concatenated ``pieces``."""
    hasher = BulkHasher()
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


def canonical_bytes(value: Any) -> bytes:
    """Return msgpack with sorted map keys; for plain dicts, lists, str, int, float, bool, bytes and None."""
    packed: bytes = msgpack.packb(_in_order(value), use_bin_type=True)
    return packed


def _in_order(item: Any) -> Any:
    """Return the value with sorted map keys. Most elements are scalars and cost no recursive call."""
    if isinstance(item, dict):
        return {key: value if type(value) in _SCALARS else _in_order(value) for key, value in sorted(item.items())}
    if isinstance(item, (list, tuple)):
        return [element if type(element) in _SCALARS else _in_order(element) for element in item]
    return item


_SCALARS = frozenset({str, bytes, int, float, bool, type(None)})
