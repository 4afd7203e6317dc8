"""The verified chunks of a state that is being downloaded, in a file where there is a folder for it.

Chunks may be of different rounds: each is kept with its `Stamp`. The file outlives the process. What a crash or a power
failure tore is found when it is opened again: each chunk has to have the hash that was noted once it was verified.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from p2ptrain.buffers import new_buffer
from p2ptrain.errors import IntegrityError, ResourceError
from p2ptrain.hashing import HASH_BYTES
from p2ptrain.network.chunks.fetch import BadContentError
from p2ptrain.network.schema import from_bytes, to_bytes
from p2ptrain.training.state.digest import (
    Cut,
    Description,
    TensorSpec,
    cut_of,
    description_hash,
    is_finite,
    leaf_of,
    proves,
)
from p2ptrain.training.state.shared_state import Stamp

DESCRIPTION_FILE = "description"
CHUNKS_FILE = "chunks"
INDEX_FILE = "index"

_NOTE = struct.Struct(f">I{Stamp.NUM_BYTES}s{HASH_BYTES}s")


class NotFiniteError(BadContentError):
    """A chunk that its digest vouches for holds NaN or infinity: the state is bad, not the peer that sent it."""


class PartialDownload:
    """The chunks that a download has so far.

    Args:
        folder: Where it is kept; None for memory.

    Attributes:
        specs: The state's tensors; empty before a first source was heard.
        stamps: Of which state each chunk is; None while it is missing.
        done: For each chunk, 1 while it is there.
        bytes_done: In chunks that are there.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._forget()

    def _forget(self) -> None:
        self.specs: tuple[TensorSpec, ...] = ()
        self.stamps: list[Stamp | None] = []
        self.done = bytearray()
        self.bytes_done = 0
        self._description = b""
        self._data = memoryview(b"")
        self._notes = -1

    @classmethod
    def open(cls, folder: Path | None) -> PartialDownload:
        """Return the download that an earlier process left in a folder, every chunk verified; else an empty one."""
        partial = cls(folder)
        if folder is not None and (folder / DESCRIPTION_FILE).is_file():
            try:
                partial._restore(folder)
            except (OSError, ValueError, IntegrityError):
                partial.discard()
        return partial

    @property
    def cut(self) -> Cut:
        """The cut of the state into chunks."""
        return cut_of(self.specs)

    @property
    def num_bytes(self) -> int:
        """Of the whole state; 0 before a first source was heard."""
        return self.cut.num_bytes if self.specs else 0

    @property
    def num_done(self) -> int:
        """Chunks that are there."""
        return self.done.count(1)

    @property
    def is_complete(self) -> bool:
        """True if all chunks are there, of whatever round each is."""
        return bool(self.specs) and all(self.done)

    def begin(self, specs: tuple[TensorSpec, ...]) -> None:
        """Make room for a state that consists of these tensors, and forget any other.

        Raises:
            ResourceError: There is no memory or no disk for it.
        """
        self.discard()
        needed = cut_of(specs).num_bytes
        try:
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / DESCRIPTION_FILE).write_bytes(to_bytes(Description(specs)))
            self._map(specs)
        except MemoryError as error:
            raise ResourceError(f"no memory for a state of {needed >> 20} MiB: close other programs") from error
        except OSError as error:
            self.discard()
            raise self._no_room(needed, error) from error

    def _no_room(self, num_bytes: int, error: OSError) -> ResourceError:
        return ResourceError(
            f"cannot keep a state of {num_bytes >> 20} MiB in {self._folder} ({error.strerror}): free some space"
        )

    def _map(self, specs: tuple[TensorSpec, ...]) -> None:
        num_bytes = max(1, cut_of(specs).num_bytes)
        if self._folder is None:
            self._data = new_buffer(num_bytes)
        else:
            descriptor = os.open(self._folder / CHUNKS_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, num_bytes)  # Without room a write to mapped memory would kill us.
                self._data = memoryview(mmap.mmap(descriptor, num_bytes))
            finally:
                os.close(descriptor)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._notes = os.open(self._folder / INDEX_FILE, flags, 0o600)
        self.specs, self._description = specs, description_hash(specs)
        self.stamps, self.done = [None] * self.cut.num_chunks, bytearray(self.cut.num_chunks)
        self.bytes_done = 0

    def _restore(self, folder: Path) -> None:
        self._map(from_bytes(Description, (folder / DESCRIPTION_FILE).read_bytes()).tensors)
        notes = (folder / INDEX_FILE).read_bytes()
        whole = len(notes) // _NOTE.size * _NOTE.size
        os.ftruncate(self._notes, whole)
        newest = {index: (stamp, leaf) for index, stamp, leaf in _NOTE.iter_unpack(notes[:whole])}
        for index, (stamp, leaf) in newest.items():
            if index < len(self.done) and leaf_of(self.chunk(index)) == leaf:
                self._mark(index, Stamp.from_bytes(stamp))

    def chunk(self, index: int) -> memoryview:
        """The bytes of a chunk, wherever they are kept."""
        start = self.cut.starts[index]
        return self._data[start : start + self.cut.chunk_bytes(index)]

    def chunks(self) -> Iterator[tuple[int, Stamp]]:
        """Return the numbers and stamps of the chunks that are there."""
        return ((index, stamp) for index, stamp in enumerate(self.stamps) if stamp is not None)

    def verifies(self, index: int, data: memoryview, stamp: Stamp, proof: memoryview) -> bool:
        """True if the proof leads from a chunk to the stamp's digest."""
        return proves(self._description, leaf_of(data), index, self.cut.num_chunks, proof, stamp.digest)

    def put(self, index: int, data: memoryview, stamp: Stamp, proof: memoryview) -> bool:
        """Verify a chunk and keep it; False when its proof does not lead to the stamp's digest.

        Raises:
            NotFiniteError: A value in it is not finite.
            ResourceError: The disk is full.
        """
        leaf = leaf_of(data)
        if not proves(self._description, leaf, index, self.cut.num_chunks, proof, stamp.digest):
            return False
        if not is_finite(self.specs, index, data):
            raise NotFiniteError("the state to be downloaded has values that are not finite")
        if not self.done[index]:
            self.chunk(index)[:] = data
            if self._notes >= 0:
                try:
                    os.write(self._notes, _NOTE.pack(index, stamp.to_bytes(), leaf))
                except OSError as error:
                    raise self._no_room(self.num_bytes, error) from error
            self._mark(index, stamp)
        return True

    def _mark(self, index: int, stamp: Stamp) -> None:
        self.stamps[index] = stamp
        self.done[index] = 1
        self.bytes_done += self.cut.chunk_bytes(index)

    def retain(self, is_wanted: Callable[[int, Stamp], bool]) -> int:
        """Forget the chunks that are not wanted; returns how many these are."""
        dropped = [index for index, stamp in self.chunks() if not is_wanted(index, stamp)]
        for index in dropped:
            self.stamps[index] = None
            self.done[index] = 0
            self.bytes_done -= self.cut.chunk_bytes(index)
        return len(dropped)

    def close(self) -> None:
        """Give the memory back; what is in files stays there."""
        if self._notes >= 0:
            os.close(self._notes)
        self._forget()

    def discard(self) -> None:
        """Forget all of it, files included."""
        self.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
