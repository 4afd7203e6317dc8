"""The hash of bulk data: BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs).

Every byte of every round and download is hashed at least once, and BLAKE3 is several times faster than SHA-256.
Identities, manifests and signed messages are small and use SHA-256.
"""

from __future__ import annotations

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
