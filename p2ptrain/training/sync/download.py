"""Download of a whole state from several peers at once, each chunk verified against a digest.

The chunks of `p2ptrain.network.chunks` come with their `Stamp`, which says of which round's state they are, and with
the hashes that lead to that state's digest. So any peer may send any chunk, and a lie is found within 1 MiB.

The swarm moves on meanwhile, and sources keep nothing: they send what they hold now. Whether a round's digest is to be
believed, `Admission` says; `p2ptrain.training.sync.background_download` brings all chunks to one round in the end. What
has arrived is in a `PartialDownload`, which outlives a download that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from p2ptrain.errors import IncompatibleError, IntegrityError, TemporaryError
from p2ptrain.network.chunks.fetch import FetchOptions, FetchReport, fetch
from p2ptrain.network.chunks.messages import Ask
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.network.rpc.pace import LeastRate, receive_steadily
from p2ptrain.network.transport import PeerId
from p2ptrain.progress import Advance
from p2ptrain.training.state.digest import CHUNK_BYTES, Description, cut_of, description_hash, leaf_of, proves
from p2ptrain.training.state.shared_state import Stamp, stamped_bytes
from p2ptrain.training.sync.partial_download import PartialDownload
from p2ptrain.training.sync.state_server import STATE, HeldState

MAX_DESCRIPTION_BYTES = 16 << 20
EXPECTED_BYTES = 64 << 20
"""Size that a transport is told to expect: the state's turns out on the stream, but is never little."""


class Admission(Protocol):
    """Which states' chunks a download takes."""

    def check_size(self, num_bytes: int) -> None:
        """Raise `IntegrityError` for a state larger than this model's can be, before there is room for it."""

    async def admit(self, source: PeerId, stamp: Stamp) -> None:
        """Return once chunks of this state are of use; called when a source's chunks are of another than before.

        Raises:
            IntegrityError: Its digest is not that of its lineage: the source is not asked again.
            TemporaryError: They are of no use now.
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
    """Download the chunks of a state that are missing; raises what `p2ptrain.network.chunks.fetch.fetch` does.

    Args:
        rpc: To reach sources.
        find_sources: See `fetch`.
        layout: This model's fingerprint; a state of another shape is refused.
        partial: Filled as chunks arrive, also when this raises.
        admission: Says which chunks are to be taken.
        options: See `fetch`.
        advance: Told how many bytes are verified, and of how many.
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
        """See `Target`."""
        cut = self._partial.cut
        return stamped_bytes(cut.chunk_bytes(index), cut.depth)

    async def agree(self, channel: Channel, options: FetchOptions) -> int:
        """See `Target`. A description is proved by any chunk's proof; no memory is given to the state before that."""
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
        await receive_steadily(channel, len(buffer), buffer, least)
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
        """See `Target`."""
        data, stamp, proof = _parts(received, self._partial.cut.chunk_bytes(index))
        if stamp != self._admitted.get(source):  # Before anybody waits for a round that may be made up.
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
    """Return a chunk's bytes, stamp and proof."""
    end = chunk_bytes + Stamp.NUM_BYTES
    return received[:chunk_bytes], Stamp.from_bytes(received[chunk_bytes:end]), received[end:]
