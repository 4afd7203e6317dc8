"""The results of the rounds since a download began, on disk if there is a folder.

The newcomer collects them during the download: other peers keep only the last few rounds, and a download may take
hours. They bring each chunk up to date, whatever its round.
"""

from __future__ import annotations

import mmap
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from p2ptrain.averaging.commit.round_log import Result
from p2ptrain.averaging.protocol.certificate import Certificate, Head
from p2ptrain.averaging.protocol.table import Table
from p2ptrain.buffers import Buffer
from p2ptrain.disk import replace_file
from p2ptrain.errors import IntegrityError, ResourceError
from p2ptrain.hashing import HASH_BYTES, bulk_hash
from p2ptrain.network.schema import from_bytes, to_bytes

BASE_FILE = "base"
_LENGTH = struct.Struct(">Q")


class RoundsSince:
    """A chain of certified results from one head on, in ``folder`` or, if that is None, in memory.

    Attributes:
        base: The head where the chain begins; None before `start`.
        tip: The head after the last result, its digest unknown; None before `start`.
        certificates: In the order of the rounds.
        positions: By lineage on the chain: how many results lead to it from the base.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self.base: Head | None = None
        self.tip: Head | None = None
        self.certificates: list[Certificate] = []
        self.positions: dict[bytes, int] = {}
        self._means: list[list[Buffer]] = []
        self._tables: list[Table] = []

    @classmethod
    def open(cls, folder: Path | None, read: Callable[[bytes], Certificate]) -> RoundsSince:
        """Return the intact part of the chain that an earlier process left in a folder.

        ``read`` parses and verifies a certificate.
        """
        rounds = cls(folder)
        if folder is None or not (folder / BASE_FILE).is_file():
            return rounds
        try:
            base = from_bytes(Head, (folder / BASE_FILE).read_bytes())
            rounds._begin(base)
            while (path := rounds._path(len(rounds.certificates))).is_file():
                certificate, means = _read(path)
                found = read(bytes(certificate))
                if rounds.tip is None or found.body.lineage != rounds.tip.lineage:
                    break
                rounds._take(found, means)
        except (OSError, ValueError, IntegrityError, struct.error):
            pass  # A torn result is fetched once more.
        return rounds

    def start(self, base: Head) -> None:
        """Discard the old chain and begin a new one; raise `ResourceError` if it cannot be written."""
        self.discard()
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                replace_file(self._folder / BASE_FILE, to_bytes(base))
            except OSError as error:
                raise ResourceError(f"cannot write to {self._folder} ({error.strerror}): free some space") from error
        self._begin(base)

    def _begin(self, base: Head) -> None:
        self.base = self.tip = base
        self.positions = {base.lineage: 0}

    def append(self, result: Result) -> None:
        """Keep the valid result that follows `tip`; raise `ResourceError` if it cannot be written."""
        means: list[Buffer] = list(result.means)
        if self._folder is not None:
            path = self._path(len(self.certificates))
            try:
                certificate = result.certificate.to_bytes()
                lengths = [len(part) for part in (certificate, *means)]
                header = _LENGTH.pack(len(lengths)) + b"".join(map(_LENGTH.pack, lengths))
                replace_file(path, bulk_hash(header, certificate, *means), header, certificate, *means)
                means = _read(path)[1]
            except OSError as error:
                raise ResourceError(f"cannot write to {self._folder} ({error.strerror}): free some space") from error
        self._take(result.certificate, means)

    def _take(self, certificate: Certificate, means: list[Buffer]) -> None:
        assert self.tip is not None
        self._tables.append(self.tip.table.check(certificate))
        self.tip = certificate.next_head(b"", self._tables[-1])
        self.certificates.append(certificate)
        self._means.append(means)
        self.positions[certificate.body.next_lineage] = len(self.certificates)

    def result(self, position: int) -> Result:
        """Return the result that leads from a position to the next."""
        return Result(self.certificates[position], self._means[position])

    def head_at(self, position: int, digest: bytes) -> Head:
        assert self.base is not None
        if not position:
            return self.base
        return self.certificates[position - 1].next_head(digest, self._tables[position - 1])

    def discard(self) -> None:
        """Forget the chain and delete its files."""
        self.base = self.tip = None
        self.certificates, self._means, self._tables, self.positions = [], [], [], {}
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, position: int) -> Path:
        assert self._folder is not None
        return self._folder / f"round-{position}"


def _read(path: Path) -> tuple[memoryview, list[Buffer]]:
    """Return the certificate and means of a result in mapped memory; raise `ValueError` if the file is torn."""
    with path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    if len(data) < HASH_BYTES + _LENGTH.size or bulk_hash(data[HASH_BYTES:]) != data[:HASH_BYTES]:
        raise ValueError(f"{path} is torn")
    (count,) = _LENGTH.unpack_from(data, HASH_BYTES)
    at = HASH_BYTES + _LENGTH.size * (1 + count)
    parts: list[memoryview] = []
    for index in range(count):
        (length,) = _LENGTH.unpack_from(data, HASH_BYTES + _LENGTH.size * (1 + index))
        parts.append(data[at : at + length])
        at += length
    return parts[0], list(parts[1:])
