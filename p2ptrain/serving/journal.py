"""Rows on their way from one stage to the next: their encoding, and the journal of a caller, which sends them again.

The wire is the third part of the arithmetic's id, as in ``exact-1/fp32/int8``, and fp32 without one. So all hosts of a
session have the same, and equal ids have equal bits. In 8 bits, blocks have 256 values, and the last one of a row ends
with the row: its bytes do not depend on the rows beside it.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import torch

from p2ptrain.buffers import Buffer
from p2ptrain.codecs.base import CodecError
from p2ptrain.codecs.blockwise import Int8Codec
from p2ptrain.serving.messages import FLOAT_BYTES

_INT8 = Int8Codec()


class Wire:
    """Encodes rows of some hidden values as fp32.

    Attributes:
        row_bytes: Size of an encoded row.
    """

    def __init__(self, hidden: int) -> None:
        self._hidden = hidden
        self.row_bytes = FLOAT_BYTES * hidden

    def encode(self, rows: torch.Tensor) -> bytes:
        """Return the bytes of ``[rows, hidden]``, fp32; raise `CodecError` for values that it has no code for."""
        return rows.numpy().tobytes()

    def decode(self, data: Buffer) -> torch.Tensor:
        """Return ``[rows, hidden]``, fp32; raise `CodecError` for bytes that `encode` does not write."""
        rows = torch.frombuffer(data, dtype=torch.float32).view(-1, self._hidden)
        if not bool(rows.isfinite().all()):
            raise CodecError("hidden states that are not finite")
        return rows


class Int8Wire(Wire):
    """Encodes rows in blocks of the ``int8`` codec; a row is about a quarter as long as in fp32."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.row_bytes = _INT8.encoded_bytes(hidden)
        self._padded = -(-hidden // _INT8.block_size) * _INT8.block_size

    def encode(self, rows: torch.Tensor) -> bytes:
        # Zeros at the end of a block change neither its scale nor its other codes.
        padded = torch.zeros(len(rows), self._padded)
        padded[:, : self._hidden] = rows
        encoded = np.frombuffer(_INT8.encode(padded.view(-1)), dtype=np.uint8)
        return encoded.reshape(len(rows), -1)[:, : self.row_bytes].tobytes()

    def decode(self, data: Buffer) -> torch.Tensor:
        encoded = np.frombuffer(data, dtype=np.uint8).reshape(-1, self.row_bytes)
        padded = np.zeros((len(encoded), _INT8.encoded_bytes(self._padded)), dtype=np.uint8)
        padded[:, : self.row_bytes] = encoded
        values, view = torch.empty(len(encoded) * self._padded), padded.reshape(-1).data
        _INT8.validate(view, len(values))
        _INT8.decode_into(view, values)
        return values.view(len(encoded), -1)[:, : self._hidden].contiguous()


def wire_of(arithmetic: str, hidden: int) -> Wire:
    """Return the wire of an arithmetic, for rows of some values."""
    return Int8Wire(hidden) if arithmetic.count("/") > 1 and arithmetic.endswith("/int8") else Wire(hidden)


class Journal:
    """One session's rows in order: the tokens' ids, and hidden states as they travel.

    Attributes:
        ids: Of all rows.
        known: Number of rows that are no drafts: nothing replaces them.
        trims: Ends of all trims, in order: a reader that has sent more sends from there again.
        changed: Set by the next change, which replaces it.
        row_bytes: Size of a row's hidden state.
        together: Sessions whose last rows were computed in one batch for one host; 0 if unknown.
    """

    def __init__(self, ids: Sequence[int] = (), row_bytes: int = 0) -> None:
        """``row_bytes`` is 0 if rows are ids alone, as for the first stage."""
        self.ids = list(ids)
        self.known = len(self.ids)
        self.trims: list[int] = []
        self.changed = asyncio.Event()
        self.row_bytes = row_bytes
        self.together = 0
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
