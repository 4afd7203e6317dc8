"""Download of a whole state from several peers at once, each chunk verified against a digest.

Each chunk comes with its `Stamp`, which names the round, and a Merkle proof up to that round's digest. So any peer may
send any chunk, and a corrupt chunk is found on arrival.

Rounds continue during the download, and each source sends its current state. `Admission` decides which digests are
trusted. `p2ptrain.training.sync.background_download` brings all chunks to one round in the end.

A `PartialDownload` keeps the chunks, each with its `Stamp`, in a file or in memory. It outlives a download that fails,
and its file outlives the process. On restart each chunk is checked against its recorded hash, which finds chunks torn
by a crash.
"""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from p2ptrain.buffers import file_buffer, new_buffer
from p2ptrain.errors import IncompatibleError, IntegrityError, ResourceError, TemporaryError
from p2ptrain.hashing import HASH_BYTES
from p2ptrain.network.chunks.fetch import BadContentError, FetchOptions, FetchReport, fetch
from p2ptrain.network.chunks.messages import Ask
from p2ptrain.network.rpc.channel import Channel, LeastRate
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.schema import from_bytes, to_bytes
from p2ptrain.progress import Advance
from p2ptrain.training.state.digest import (
    CHUNK_BYTES,
    Cut,
    Description,
    TensorSpec,
    cut_of,
    description_hash,
    is_finite,
    proves,
)
from p2ptrain.training.state.shared_state import SharedState, Stamp, stamped_bytes
from p2ptrain.training.sync.state_server import STATE, HeldState

EXPECTED_BYTES = 64 << 20
"""Size hint for the transport; the exact size is known only on the stream."""

DESCRIPTION_FILE = "description"
CHUNKS_FILE = "chunks"
INDEX_FILE = "index"

_ENTRY = struct.Struct(f">I{Stamp.NUM_BYTES}s{HASH_BYTES}s")


class Admission(Protocol):
    """Decides which states' chunks a download takes."""

    async def admit(self, source: str, stamp: Stamp) -> None:
        """Return once chunks of this state are useful; called when a source's stamp changes.

        Raises:
            IntegrityError: The digest is wrong for its lineage; the source is not asked again.
            TemporaryError: The chunks are not useful now.
        """

    async def wait_for_turn(self) -> None:
        """Return once nothing more urgent needs the link; called before chunks are asked for."""


async def download_state(
    rpc: Rpc,
    find_sources: Callable[[], Sequence[str]],
    own: SharedState,
    partial: PartialDownload,
    admission: Admission,
    options: FetchOptions | None = None,
    advance: Advance = lambda done, total: None,
) -> FetchReport:
    """Download the missing chunks of a state; raises the errors of `p2ptrain.network.chunks.fetch.fetch`.

    A state that ``own`` could not hold is refused before a byte of it is kept. ``partial`` keeps the chunks, also if
    this raises. ``advance`` receives verified and total bytes.
    """
    return await fetch(rpc, STATE, b"", _Target(rpc, own, partial, admission, advance), find_sources, options)


class _Target:
    """Verifies chunks and keeps them in a `PartialDownload`; implements `p2ptrain.network.chunks.fetch.Target`."""

    asks_at_once = False
    expected_bytes = EXPECTED_BYTES

    def __init__(
        self, rpc: Rpc, own: SharedState, partial: PartialDownload, admission: Admission, advance: Advance
    ) -> None:
        self._runtime = rpc.runtime
        self._own = own
        self._partial = partial
        self._admission = admission
        self._advance = advance
        self._admitted: dict[str, Stamp] = {}
        self.done = partial.done
        self.wait_for_turn = admission.wait_for_turn

    @property
    def is_complete(self) -> bool:
        return bool(self.done) and all(self.done)

    @property
    def most_bytes(self) -> int:
        return stamped_bytes(CHUNK_BYTES, self._partial.cut.depth)

    def wire_bytes(self, index: int) -> int:
        cut = self._partial.cut
        return stamped_bytes(cut.chunk_bytes(index), cut.depth)

    async def agree(self, channel: Channel, options: FetchOptions) -> int:
        """Receive and check a source's description; a chunk proves the first one before memory is allocated."""
        source, num_bytes = channel.remote, 0
        held = await channel.receive(HeldState, options.open_seconds, self._own.max_description_bytes)
        if held.layout != self._own.layout.fingerprint:
            raise IncompatibleError(f"peer {source[-8:]} trains a model of another shape")
        if not self._partial.specs:
            num_bytes = await self._take_first(channel, held.description.tensors, options.least)
        if held.description.tensors != self._partial.specs:
            raise TemporaryError(f"peer {source[-8:]} holds a state of other tensors")
        return num_bytes

    async def _take_first(self, channel: Channel, specs: tuple[TensorSpec, ...], least: LeastRate) -> int:
        self._own.check_specs(specs)
        source, cut = channel.remote, cut_of(specs)
        if not cut.num_chunks:
            raise IntegrityError(f"peer {source[-8:]} described a state of nothing")
        buffer = memoryview(bytearray(stamped_bytes(cut.chunk_bytes(0), cut.depth)))
        await channel.send(Ask([0]))
        await channel.receive_steadily(buffer, least)
        data, stamp, proof = _parts(buffer, cut.chunk_bytes(0))
        leaf = await self._runtime.offload(cut.leaf, 0, data)
        if not proves(description_hash(specs), leaf, 0, cut.num_chunks, proof, stamp.digest):
            raise IntegrityError(f"peer {source[-8:]} described a state that has not the digest asked for")
        await self._admission.admit(source, stamp)
        if self._partial.specs:
            return 0
        self._partial.begin(specs)
        await self._keep(source, 0, data, stamp, proof)
        return len(data)

    async def put(self, source: str, index: int, received: memoryview) -> int:
        data, stamp, proof = _parts(received, self._partial.cut.chunk_bytes(index))
        if stamp != self._admitted.get(source):  # Verified first: the stamp may name a made-up round.
            if not await self._runtime.offload(self._partial.verifies, index, data, stamp, proof):
                raise IntegrityError(f"peer {source[-8:]} sent a chunk that does not match its hash")
            await self._admission.admit(source, stamp)
            self._admitted[source] = stamp
        await self._keep(source, index, data, stamp, proof)
        return len(data)

    async def _keep(self, source: str, index: int, data: memoryview, stamp: Stamp, proof: memoryview) -> None:
        if not await self._runtime.compute(self._partial.put, index, data, stamp, proof):
            raise IntegrityError(f"peer {source[-8:]} sent a chunk that does not match its hash")
        self._advance(self._partial.bytes_done, self._partial.num_bytes)


def _parts(received: memoryview, chunk_bytes: int) -> tuple[memoryview, Stamp, memoryview]:
    end = chunk_bytes + Stamp.NUM_BYTES
    return received[:chunk_bytes], Stamp.from_bytes(received[chunk_bytes:end]), received[end:]


class NotFiniteError(BadContentError):
    """A verified chunk holds NaN or infinity: the state is bad, not the peer that sent it."""


class PartialDownload:
    """The chunks of an unfinished download, in ``folder`` or, if that is None, in memory.

    Attributes:
        specs: The state's tensors; empty until a source has described them.
        stamps: The state that each chunk belongs to; None for a missing chunk.
        done: 1 for each chunk that is present; always the same object.
        bytes_done: Size of the chunks that are present.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self.done = bytearray()
        self._forget()

    def _forget(self) -> None:
        self.specs: tuple[TensorSpec, ...] = ()
        self.stamps: list[Stamp | None] = []
        self.done.clear()
        self.bytes_done = 0
        self._description = b""
        self._data = memoryview(b"")
        self._index = -1

    @classmethod
    def open(cls, folder: Path | None) -> PartialDownload:
        """Return the download that an earlier process left, every chunk verified; an empty one if there is none."""
        partial = cls(folder)
        if folder is not None and (folder / DESCRIPTION_FILE).is_file():
            try:
                partial._restore(folder)
            except (OSError, ValueError, IntegrityError):
                partial.discard()
        return partial

    @property
    def cut(self) -> Cut:
        return cut_of(self.specs)

    @property
    def num_bytes(self) -> int:
        """Size of the whole state; 0 until a source has described it."""
        return self.cut.num_bytes if self.specs else 0

    @property
    def num_done(self) -> int:
        return self.done.count(1)

    @property
    def is_complete(self) -> bool:
        """True if all chunks are present, of whatever rounds."""
        return bool(self.done) and all(self.done)

    def begin(self, specs: tuple[TensorSpec, ...]) -> None:
        """Discard all chunks, and allocate a state of these tensors; raise `ResourceError` if there is no room."""
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
            self._data = file_buffer(self._folder / CHUNKS_FILE, num_bytes)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._index = os.open(self._folder / INDEX_FILE, flags, 0o600)
        self.specs, self._description = specs, description_hash(specs)
        self.stamps, self.done[:] = [None] * self.cut.num_chunks, bytes(self.cut.num_chunks)
        self.bytes_done = 0

    def _restore(self, folder: Path) -> None:
        self._map(from_bytes(Description, (folder / DESCRIPTION_FILE).read_bytes()).tensors)
        notes = (folder / INDEX_FILE).read_bytes()
        whole = len(notes) // _ENTRY.size * _ENTRY.size
        os.ftruncate(self._index, whole)
        newest = {index: (stamp, leaf) for index, stamp, leaf in _ENTRY.iter_unpack(notes[:whole])}
        for index, (stamp, leaf) in newest.items():
            if index < len(self.done) and self.cut.leaf(index, self.chunk(index)) == leaf:
                self._mark(index, Stamp.from_bytes(stamp))

    def chunk(self, index: int) -> memoryview:
        start = self.cut.starts[index]
        return self._data[start : start + self.cut.chunk_bytes(index)]

    def chunks(self) -> Iterator[tuple[int, Stamp]]:
        return ((index, stamp) for index, stamp in enumerate(self.stamps) if stamp is not None)

    def verifies(self, index: int, data: memoryview, stamp: Stamp, proof: memoryview) -> bool:
        return proves(self._description, self.cut.leaf(index, data), index, self.cut.num_chunks, proof, stamp.digest)

    def put(self, index: int, data: memoryview, stamp: Stamp, proof: memoryview) -> bool:
        """Verify a chunk and keep it; return False if its proof does not lead to the stamp's digest.

        Raises:
            NotFiniteError: The chunk holds a value that is not finite.
            ResourceError: The disk is full.
        """
        leaf = self.cut.leaf(index, data)
        if not proves(self._description, leaf, index, self.cut.num_chunks, proof, stamp.digest):
            return False
        if not is_finite(self.specs, index, data):
            raise NotFiniteError("the state to be downloaded has values that are not finite")
        if not self.done[index]:
            self.chunk(index)[:] = data
            if self._index >= 0:
                try:
                    os.write(self._index, _ENTRY.pack(index, stamp.to_bytes(), leaf))
                except OSError as error:
                    raise self._no_room(self.num_bytes, error) from error
            self._mark(index, stamp)
        return True

    def _mark(self, index: int, stamp: Stamp) -> None:
        self.stamps[index] = stamp
        self.done[index] = 1
        self.bytes_done += self.cut.chunk_bytes(index)

    def retain(self, is_wanted: Callable[[int, Stamp], bool]) -> int:
        """Forget the unwanted chunks; return their number."""
        dropped = [index for index, stamp in self.chunks() if not is_wanted(index, stamp)]
        for index in dropped:
            self.stamps[index] = None
            self.done[index] = 0
            self.bytes_done -= self.cut.chunk_bytes(index)
        return len(dropped)

    def close(self) -> None:
        """Release the memory; keep the files."""
        if self._index >= 0:
            os.close(self._index)
        self._forget()

    def discard(self) -> None:
        """Forget all chunks and delete the files."""
        self.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
