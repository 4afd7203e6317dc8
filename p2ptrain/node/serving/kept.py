"""Weights in files: a source's copy, and the newest weights of a peer that only serves."""

from __future__ import annotations

from pathlib import Path

from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.buffers import file_buffer, new_buffer
from p2ptrain.errors import IntegrityError, ResourceError
from p2ptrain.hashing import HASH_BYTES, bulk_hash
from p2ptrain.network.schema import from_bytes, to_bytes


def unlinked_memory(folder: Path | None, num_bytes: int) -> memoryview:
    """Return memory of an unlinked file in a folder, or of the process if there is none.

    Raises:
        ResourceError: The disk is full.
    """
    if folder is None:
        return new_buffer(num_bytes)
    path = folder / "weights-for-others"
    memory = _file_memory(path, num_bytes)
    path.unlink()
    return memory


def _file_memory(path: Path, num_bytes: int) -> memoryview:
    try:
        path.unlink(missing_ok=True)
        return file_buffer(path, max(num_bytes, 1))[:num_bytes]
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ResourceError(
            f"cannot keep weights of {num_bytes >> 20} MiB in {path.parent} ({error.strerror}): free some space"
        ) from error


class KeptWeights:
    """The newest vector of a unit, and its head, in ``folder``, or without one in memory."""

    def __init__(self, folder: Path | None, name: str, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._new, self._path, self._head = (
            folder and folder / f"served-{name}{suffix}" for suffix in (".new", "", ".head")
        )

    def allocate(self) -> memoryview:
        """Return memory for the next vector; raise `ResourceError` if the disk is full."""
        return new_buffer(self._num_bytes) if self._new is None else _file_memory(self._new, self._num_bytes)

    def keep(self, vector: memoryview, head: Head) -> None:
        """Replace the kept vector by the one in the last `allocate`; raise `ResourceError` if the disk is full.

        After a crash in the middle of it, the hash does not fit and nothing counts as kept.
        """
        if self._new is None or self._path is None or self._head is None:
            return
        try:
            self._new.replace(self._path)
            self._head.write_bytes(bulk_hash(vector) + to_bytes(head))
        except OSError as error:
            raise ResourceError(f"cannot write to {self._head} ({error.strerror}): free some space") from error

    def read(self) -> tuple[memoryview, Head] | None:
        """Return what an earlier process kept; None if there is nothing, or it is damaged."""
        if self._path is None or self._head is None:
            return None
        try:
            data, num_bytes = self._head.read_bytes(), max(self._num_bytes, 1)
            if self._path.stat().st_size != num_bytes:
                return None
            vector = file_buffer(self._path, num_bytes)[: self._num_bytes]
            is_right = bulk_hash(vector) == data[:HASH_BYTES]
            return (vector, from_bytes(Head, data[HASH_BYTES:])) if is_right else None
        except (OSError, ValueError, IntegrityError):
            return None
