"""An append-only log whose entries are signed, and chained by hashes.

Each line is a JSON object: ``entry``, and ``proof``, the signature over the entry's canonical JSON. An entry has its
number ``n``, counted from 0, its time ``at``, and in ``before`` the SHA-256 of the line before it. A second file holds
the hash of the last line, so that a log that lost lines at its end is found out.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2ptrain.disk import replace_file
from p2ptrain.errors import IntegrityError, ResourceError
from p2ptrain.signing import Signer

MAX_LINE_BYTES = 1 << 16
"""> an entry that names the 256 members of the largest group."""
_CONTEXT = b"p2ptrain log of departures 1\n"
_FIRST = "0" * 64


@dataclass(frozen=True)
class Verified:
    """A log that verified.

    Attributes:
        entries: The entries, oldest first.
        hashes: SHA-256 of each line, in hexadecimal.
        torn_bytes: Length of an incomplete last line, which a crash left.
    """

    entries: list[dict[str, Any]]
    hashes: list[str]
    torn_bytes: int

    @property
    def head(self) -> str:
        """The hash of the last line."""
        return self.hashes[-1] if self.hashes else _FIRST


def read_chain(path: Path, verifier: Signer, peer: str = "", *, only_last: bool = False) -> Verified:
    """Return a log's entries; see the module.

    Args:
        peer: The id of the key that signed it; empty takes the one that the first entry names as ``peer``.
        only_last: Verify the signature of the last line alone: by their hashes it covers all lines before it.

    Raises:
        IntegrityError: A line was changed, removed, added or moved, or the log lost lines at its end.
        OSError: It cannot be read.
    """
    last = _head_file(path)
    expected = last.read_text().strip() if last.exists() else None  # First, because a running peer appends meanwhile.
    whole, _, torn = path.read_bytes().rpartition(b"\n")
    entries: list[dict[str, Any]] = []
    hashes: list[str] = []
    lines = whole.splitlines() if whole else []
    for number, line in enumerate(lines):
        where = f"{path}, line {number + 1}"
        try:
            parsed: dict[str, Any] = json.loads(line[: MAX_LINE_BYTES + 1])
            entry, proof = parsed["entry"], base64.b64decode(parsed["proof"], validate=True)
            peer = peer or entry["peer"]
            is_next = entry["n"] == number and entry["before"] == (hashes[-1] if hashes else _FIRST)
        except (ValueError, KeyError, TypeError, binascii.Error) as error:
            raise IntegrityError(f"{where} is no entry of a log") from error
        if not is_next:
            raise IntegrityError(f"{where} does not follow the line before it: a line was changed, removed or added")
        is_signed = only_last and number < len(lines) - 1
        if not is_signed and not verifier.verify(peer, _CONTEXT + _canonical(entry), proof):
            raise IntegrityError(f"{where} is not signed by peer {peer}")
        entries.append(entry)
        hashes.append(hashlib.sha256(line).hexdigest())
    if expected is not None and expected not in hashes:
        raise IntegrityError(f"{path} lost lines at its end: none has the hash {expected} of {last}")
    return Verified(entries, hashes, len(torn))


class Chain:
    """Appends to a log, one line a call; each is on the disk when the call returns. Safe from any thread.

    Attributes:
        size: Number of entries.
        head: The hash of the last line.
    """

    def __init__(self, path: Path, signer: Signer, now: Callable[[], float], found: Verified) -> None:
        """Private: use `go_on`."""
        self.path = path
        self.size = len(found.entries)
        self.head = found.head
        self._signer = signer
        self._now = now
        self._lock = threading.Lock()

    @classmethod
    def go_on(cls, path: Path, signer: Signer, now: Callable[[], float]) -> tuple[Chain, list[dict[str, Any]]]:
        """Return the log, which may be new, and its entries; cut an incomplete last line, and note the cut.

        Raises:
            IntegrityError: As `read_chain`.
            ResourceError: It cannot be read or written.
        """
        try:
            found = Verified([], [], 0)
            if path.exists():
                found = read_chain(path, signer, signer.peer_id, only_last=True)
            elif (last := _head_file(path)).exists():
                raise IntegrityError(f"{path} is gone, and {last} names its last line: put it back")
            chain = cls(path, signer, now, found)
            if found.torn_bytes:
                os.truncate(path, path.stat().st_size - found.torn_bytes)
                chain.append("cut", bytes=found.torn_bytes)
        except OSError as error:
            raise ResourceError(f"{path}: {error.strerror}") from error
        return chain, found.entries

    def append(self, what: str, **values: Any) -> None:
        """Sign an entry and write it; raise `ResourceError` if the disk does not take it."""
        with self._lock:
            self._append(what, values)

    def _append(self, what: str, values: dict[str, Any]) -> None:
        entry = {
            "n": self.size, "at": round(self._now(), 3), "before": self.head, "peer": self._signer.peer_id,
            "what": what, **values,
        }  # fmt: skip
        proof = base64.b64encode(self._signer.sign(_CONTEXT + _canonical(entry))).decode()
        line = _canonical({"entry": entry, "proof": proof})
        try:
            self._write(line + b"\n")
            self.head = hashlib.sha256(line).hexdigest()
            self.size += 1
            replace_file(_head_file(self.path), f"{self.head}\n".encode(), synced=True)
        except OSError as error:
            raise ResourceError(f"{self.path}: {error.strerror}; nothing leaves without an entry there") from error

    def _write(self, line: bytes) -> None:
        """Append a line to the file; an `OSError` leaves the file as it was, so that the next line is whole."""
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("ab") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self.path, size)
            raise


def _head_file(path: Path) -> Path:
    return path.with_suffix(".head")


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
