"""Hashes of a prompt's pages: equal hashes mean equal tokens up to the page's end."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from p2ptrain.models.exact import PAGE

MAX_PREFIX_PAGES = 2048
"""Pages of a prompt that a ticket names at most; the rows of later ones are computed."""


def next_hash(previous: bytes, ids: Sequence[int]) -> bytes:
    """Return the hash of one page's ids, `PAGE` of them, and of all pages before; ``previous`` is empty at first."""
    return hashlib.sha256(previous + struct.pack(f"<{PAGE}I", *ids)).digest()


def page_hashes(ids: Sequence[int]) -> tuple[bytes, ...]:
    """Return the hash of each full page of a prompt, of the first `MAX_PREFIX_PAGES`."""
    found, last = [], b""
    for first in range(0, min(len(ids) // PAGE, MAX_PREFIX_PAGES) * PAGE, PAGE):
        last = next_hash(last, ids[first : first + PAGE])
        found.append(last)
    return tuple(found)
