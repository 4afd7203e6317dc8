"""The rows that a caller sends to the next stage, kept so that a substitute can be given them again."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence

from p2ptrain.serving.messages import FLOAT_BYTES


class Journal:
    """One session's rows in order: the tokens' ids, and hidden states as fp32 bytes.

    Attributes:
        ids: Of all rows.
        known: Number of rows that are no drafts: nothing replaces them.
        trims: Ends of all trims, in order: a reader that has sent more sends from there again.
        changed: Set by the next change, which replaces it.
        row_bytes: Size of a row's hidden state.
    """

    def __init__(self, ids: Sequence[int] = (), width: int = 0) -> None:
        """``width`` is the number of values of a row; 0 if rows are ids alone, as for the first stage."""
        self.ids = list(ids)
        self.known = len(self.ids)
        self.trims: list[int] = []
        self.changed = asyncio.Event()
        self.row_bytes = width * FLOAT_BYTES
        self._firsts: list[int] = []
        self._chunks: list[bytes] = []

    @property
    def end(self) -> int:
        """Number of rows."""
        return len(self.ids)

    def append(self, ids: Sequence[int], rows: bytes = b"", known: int | None = None) -> None:
        """Add rows at the end; of all rows those before ``known`` are no drafts, None for all."""
        if len(rows) != len(ids) * self.row_bytes:
            raise ValueError(f"{len(rows)} bytes for {len(ids)} rows of {self.row_bytes} bytes")
        if rows:
            self._firsts.append(self.end)
            self._chunks.append(rows)
        self.ids += ids
        self.known = self.end if known is None else min(max(self.known, known), self.end)
        self.tell()

    def trim(self, end: int) -> None:
        """Remove the rows from ``end`` on; later ones replace them."""
        if end >= self.end:
            return
        del self.ids[end:]
        while self._firsts and self._firsts[-1] >= end:
            self._firsts.pop()
            self._chunks.pop()
        if self._chunks:
            self._chunks[-1] = self._chunks[-1][: (end - self._firsts[-1]) * self.row_bytes]
        self.known = min(self.known, end)
        self.trims.append(end)

    def tell(self) -> None:
        """Wake those who wait for `changed`."""
        self.changed.set()
        self.changed = asyncio.Event()

    def rows(self, first: int, stop: int) -> bytes:
        """Return the bytes of the rows from ``first`` to before ``stop``."""
        found: list[memoryview] = []
        at = bisect_right(self._firsts, first) - 1
        while first < stop and self.row_bytes:
            start, chunk = self._firsts[at], self._chunks[at]
            last = min(stop, start + len(chunk) // self.row_bytes)
            found.append(memoryview(chunk)[(first - start) * self.row_bytes : (last - start) * self.row_bytes])
            first, at = last, at + 1
        return b"".join(found)
