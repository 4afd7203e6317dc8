"""Download of a whole state from several peers at once, each chunk verified against a digest.

Each chunk comes with its `Stamp`, which names the round, and a Merkle proof up to that round's digest. So any peer may
send any chunk, and a corrupt chunk is found on arrival.

Rounds continue during the download, and each source sends its current state. `Admission` decides which digests are
trusted. `p2ptrain.training.sync.background_download` brings all chunks to one round in the end. A `PartialDownload`
keeps the chunks, and outlives a download that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from p2ptrain.errors import IncompatibleError, IntegrityError, TemporaryError
from p2ptrain.network.chunks.fetch import FetchOptions, FetchReport, fetch
from p2ptrain.network.chunks.messages import Ask
from p2ptrain.network.rpc.channel import Channel, LeastRate
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.transport import PeerId
from p2ptrain.progress import Advance
from p2ptrain.training.state.digest import CHUNK_BYTES, Description, cut_of, description_hash, leaf_of, proves
from p2ptrain.training.state.shared_state import Stamp, stamped_bytes
from p2ptrain.training.sync.partial_download import PartialDownload
from p2ptrain.training.sync.state_server import STATE, HeldState

MAX_DESCRIPTION_BYTES = 16 << 20
EXPECTED_BYTES = 64 << 20
"""Size hint for the transport; the exact size is known only on the stream."""


class Admission(Protocol):
    """Decides which states' chunks a download takes."""

    def check_size(self, num_bytes: int) -> None:
        """Raise `IntegrityError` for a state larger than this model's can be; called before memory is allocated."""

    async def admit(self, source: PeerId, stamp: Stamp) -> None:
        """Return once chunks of this state are useful; called when a source's stamp changes.

        Raises:
            IntegrityError: The digest is wrong for its lineage; the source is not asked again.
            TemporaryError: The chunks are not useful now.
        """

    async def wait_for_turn(self) -> None:
        """Return once nothing more urgent needs the link; called before chunks are asked for."""


async def download_state(
    rpc: Rpc,
    find_sources: Callable[[], Sequence[PeerId]],
    layout: bytes,
    partial: PartialDownload,
    admission: Admission,
    options: FetchOptions | None = None,
    advance: Advance = lambda done, total: None,
) -> FetchReport:
    """Download the missing chunks of a state; raises the errors of `p2ptrain.network.chunks.fetch.fetch`.

    ``layout`` is this model's fingerprint; a state of another layout is refused. ``partial`` keeps the chunks, also if
    this raises. ``advance`` receives verified and total bytes.
    """
    return await fetch(rpc, STATE, b"", _Target(rpc, layout, partial, admission, advance), find_sources, options)


class _Target:
    """Verifies chunks and keeps them in a `PartialDownload`; implements `p2ptrain.network.chunks.fetch.Target`."""

    asks_at_once = False
    expected_bytes = EXPECTED_BYTES

    def __init__(
        self, rpc: Rpc, layout: bytes, partial: PartialDownload, admission: Admission, advance: Advance
    ) -> None:
        self._runtime = rpc.runtime
        self._layout = layout
        self._partial = partial
        self._admission = admission
        self._advance = advance
        self._admitted: dict[PeerId, Stamp] = {}
        self.wait_for_turn = admission.wait_for_turn

    @property
    def done(self) -> bytearray:
        return self._partial.done

    @property
    def is_complete(self) -> bool:
        return self._partial.is_complete

    @property
    def most_bytes(self) -> int:
        return stamped_bytes(CHUNK_BYTES, self._partial.cut.depth)

    def wire_bytes(self, index: int) -> int:
        cut = self._partial.cut
        return stamped_bytes(cut.chunk_bytes(index), cut.depth)

    async def agree(self, channel: Channel, options: FetchOptions) -> int:
        """Receive and check a source's description; a chunk proves the first one before memory is allocated."""
        source, num_bytes = channel.remote, 0
        held = await channel.receive(HeldState, options.open_seconds, MAX_DESCRIPTION_BYTES)
        if held.layout != self._layout:
            raise IncompatibleError(f"peer {source[-8:]} trains a model of another shape")
        if not self._partial.specs:
            num_bytes = await self._take_first(channel, held.description, options.least)
        if held.description.tensors != self._partial.specs:
            raise TemporaryError(f"peer {source[-8:]} holds a state of other tensors")
        return num_bytes

    async def _take_first(self, channel: Channel, description: Description, least: LeastRate) -> int:
        self._admission.check_size(description.num_bytes)
        source, specs = channel.remote, description.tensors
        cut = cut_of(specs)
        if not cut.num_chunks:
            raise IntegrityError(f"peer {source[-8:]} described a state of nothing")
        buffer = memoryview(bytearray(stamped_bytes(cut.chunk_bytes(0), cut.depth)))
        await channel.send(Ask([0]))
        await channel.receive_steadily(buffer, least)
        data, stamp, proof = _parts(buffer, cut.chunk_bytes(0))
        leaf = await self._runtime.offload(leaf_of, data)
        if not proves(description_hash(specs), leaf, 0, cut.num_chunks, proof, stamp.digest):
            raise IntegrityError(f"peer {source[-8:]} described a state that has not the digest asked for")
        await self._admission.admit(source, stamp)
        if self._partial.specs:
            return 0
        self._partial.begin(specs)
        await self._keep(source, 0, data, stamp, proof)
        return len(data)

    async def put(self, source: PeerId, index: int, received: memoryview) -> int:
        data, stamp, proof = _parts(received, self._partial.cut.chunk_bytes(index))
        if stamp != self._admitted.get(source):  # Verified first: the stamp may name a made-up round.
            if not await self._runtime.offload(self._partial.verifies, index, data, stamp, proof):
                raise IntegrityError(f"peer {source[-8:]} sent a chunk that does not match its hash")
            await self._admission.admit(source, stamp)
            self._admitted[source] = stamp
        await self._keep(source, index, data, stamp, proof)
        return len(data)

    async def _keep(self, source: PeerId, index: int, data: memoryview, stamp: Stamp, proof: memoryview) -> None:
        if not await self._runtime.compute(self._partial.put, index, data, stamp, proof):
            raise IntegrityError(f"peer {source[-8:]} sent a chunk that does not match its hash")
        self._advance(self._partial.bytes_done, self._partial.num_bytes)


def _parts(received: memoryview, chunk_bytes: int) -> tuple[memoryview, Stamp, memoryview]:
    end = chunk_bytes + Stamp.NUM_BYTES
    return received[:chunk_bytes], Stamp.from_bytes(received[chunk_bytes:end]), received[end:]
