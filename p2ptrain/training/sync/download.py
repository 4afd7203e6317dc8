"""Download of a whole state from several peers at once, each chunk verified against a digest.

One channel a source, ``state.chunks``. Each chunk comes with its `Stamp`, which says of which round's state it is, and
with the hashes that lead to that state's digest. So any peer may send any chunk, and a lie is found within 1 MiB::

    newcomer                                             source
      | {describe}                                         |
      |                     {layout, tensors, num_chunks}  |
      | {first, count}, {first, count} (asked ahead) ->    |  each chunk as one bulk buffer: bytes, stamp, proof
      | END                                                |

The swarm moves on meanwhile, and sources keep nothing: they send what they hold now. Whether a round's digest is to be
believed, `Admission` says; `p2ptrain.training.sync.background_download` brings all chunks to one round in the end.
There is no deadline: a download goes on while bytes arrive at a least rate. What is asked of whom is decided by
`p2ptrain.training.sync.chunk_pool`. What has arrived is in a `PartialDownload`, which outlives a download that fails.
Chunks go through buffers of their own, so that only verified bytes touch the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from p2ptrain.averaging.protocol.head import Head
from p2ptrain.errors import (
    DeadlineError,
    IncompatibleError,
    IntegrityError,
    P2PTrainError,
    PeerLostError,
    PeerRefusedError,
    ProtocolError,
    ResourceError,
    TemporaryError,
)
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.network.rpc.pace import LEAST_RATE, LeastRate, receive_steadily
from p2ptrain.network.schema import from_wire
from p2ptrain.network.transport import PeerId
from p2ptrain.progress import Advance
from p2ptrain.runtime import Runtime
from p2ptrain.tasks import Tasks
from p2ptrain.training.state.digest import (
    CHUNK_BYTES,
    TensorSpec,
    cut_of,
    description_hash,
    leaf_of,
    proves,
    specs_from_wire,
)
from p2ptrain.training.state.shared_state import Stamp, stamped_bytes
from p2ptrain.training.sync.chunk_pool import ChunkPool
from p2ptrain.training.sync.partial_download import NotFiniteError, PartialDownload
from p2ptrain.training.sync.state_server import ServeLimits, StateServer

__all__ = [
    "Admission",
    "DownloadReport",
    "PartialDownload",
    "ServeLimits",
    "StateServer",
    "TransferTimes",
    "download_state",
    "fetch_head",
]

logger = logging.getLogger(__name__)

MAX_DESCRIPTION_BYTES = 16 << 20
EXPECTED_BYTES = 64 << 20
"""What a transport is told to expect: how much a state is turns out on the stream, but it is never little."""
RANGES_ASKED_AHEAD = 2
CHECKS_BEHIND = 3
"""Chunks that may wait for their verification while the next one arrives."""
MAX_SOURCES = 4
"""Asked at the same time."""
MAX_ATTEMPTS = 3
FIRST_RETRY_SECONDS = 0.25
REPLACE_SECONDS = 60.0
"""Between two times that the slowest source gives its place to one that was not asked yet."""
LOOK_SECONDS = 2.0
"""How often it is looked for sources that have come since."""


async def fetch_head(rpc: Rpc, source: PeerId, timeout_seconds: float = 10.0) -> Head:
    """Ask a peer for the head of its state; the caller checks the certificate.

    Raises:
        PeerError: The peer cannot be reached, refuses, or answers nonsense.
        IntegrityError: The head is malformed.
        DeadlineError: No answer in time.
    """
    reply = await rpc.call(source, "state.info", {}, dict, timeout_seconds, max_reply_bytes=4 << 20)
    return from_wire(Head, reply.get("head"))


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


@dataclass(frozen=True)
class DownloadReport:
    """How a download went.

    Attributes:
        bytes_from: Verified bytes by source.
        faults: Why sources were given up.
    """

    bytes_from: dict[PeerId, int]
    faults: dict[PeerId, str]


@dataclass(frozen=True)
class TransferTimes:
    """Deadlines within a download."""

    open_seconds: float = 10.0
    """Dialling a source; and hearing its description."""
    least: LeastRate = LEAST_RATE
    """What a source has to send; slower ones count as stalled."""


async def download_state(
    rpc: Rpc,
    runtime: Runtime,
    find_sources: Callable[[], Sequence[PeerId]],
    layout_fingerprint: bytes,
    partial: PartialDownload,
    admission: Admission,
    times: TransferTimes | None = None,
    advance: Advance = lambda done, total: None,
) -> DownloadReport:
    """Download the chunks that ``partial`` lacks, in parallel, until it has all.

    Args:
        rpc: To reach sources; lies are counted in its ``refusals``.
        runtime: Hashes off the event loop.
        find_sources: The peers to be asked, in order of preference; called again and again, since peers come and go.
        layout_fingerprint: This model's; a state of another shape is refused.
        partial: Filled as chunks arrive, also when this raises.
        admission: Says which chunks are to be taken.
        times: Deadlines within.
        advance: Told how many bytes are verified, and of how many.

    Raises:
        IncompatibleError: No source is left, and one holds the state of another model.
        IntegrityError: No source is left, and one sent what its digest does not vouch for; or the state itself has
            values that are not finite.
        PeerRefusedError: No source is left; all refuse.
        PeerLostError: No source is left.
        DeadlineError: No source is left, and one sent too little.
        ResourceError: There is no memory or no disk for it.
    """
    download = _Download(
        rpc, runtime, find_sources, layout_fingerprint, partial, admission, times or TransferTimes(), advance
    )
    await download.run()
    return DownloadReport(dict(download.bytes_from), download.fault_texts())


class _Download:
    """One download: a pool of chunks, and one task a source that empties it."""

    def __init__(
        self,
        rpc: Rpc,
        runtime: Runtime,
        find_sources: Callable[[], Sequence[PeerId]],
        layout: bytes,
        partial: PartialDownload,
        admission: Admission,
        times: TransferTimes,
        advance: Advance,
    ) -> None:
        self._rpc = rpc
        self._runtime = runtime
        self._find_sources = find_sources
        self._layout = layout
        self._partial = partial
        self._admission = admission
        self._times = times
        self._advance = advance
        self._pool = ChunkPool()
        self._faults: dict[PeerId, P2PTrainError | None] = {}
        self._tasks: dict[PeerId, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._rested: set[PeerId] = set()
        self._admitted: dict[PeerId, Stamp] = {}
        self._replace_at = asyncio.get_running_loop().time() + REPLACE_SECONDS
        self._before: Counter[PeerId] = Counter()
        self.bytes_from: Counter[PeerId] = Counter()
        if partial.specs:
            self._pool.fill(partial.done)

    def fault_texts(self) -> dict[PeerId, str]:
        """Why sources were given up."""
        return {source: str(fault) for source, fault in self._faults.items() if fault is not None}

    async def run(self) -> None:
        """Return when all is there; see `download_state` for what is raised."""
        async with Tasks() as tasks:
            while not self._partial.is_complete and self._start_sources(tasks):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._changed.wait()
        if not self._partial.is_complete:
            raise self._verdict()

    def _start_sources(self, tasks: Tasks) -> bool:
        """Ask further peers where there is room for them; whether any is being asked."""
        found = [source for source in self._find_sources() if source != self._rpc.peer_id]
        fresh = [source for source in found if source not in self._tasks]
        running = [source for source, task in self._tasks.items() if not task.done()]
        if fresh and len(running) >= MAX_SOURCES:
            self._rest_slowest(running)
        rested = [source for source in found if source in self._rested and self._tasks[source].done()]
        for source in [*fresh, *rested][: max(0, MAX_SOURCES - len(running))]:
            self._rested.discard(source)
            self._faults[source] = None
            self._pool.join(source)
            self._tasks[source] = tasks.start(self._use(source), f"state-from-{source[-8:]}")
            running.append(source)
        return bool(running)

    def _rest_slowest(self, running: list[PeerId]) -> None:
        """Have the source that sent least of late give its place to one that was not asked yet, now and then."""
        now = asyncio.get_running_loop().time()
        if now < self._replace_at:
            return
        slowest = min(running, key=lambda source: self.bytes_from[source] - self._before[source])
        logger.info("state download: peer %s gives its place to another source", slowest[-8:])
        self._tasks[slowest].cancel()
        self._rested.add(slowest)
        running.remove(slowest)
        self._replace_at, self._before = now + REPLACE_SECONDS, Counter(self.bytes_from)

    def _verdict(self) -> P2PTrainError:
        """The most telling of the sources' faults, with all of them in its message."""
        faults = [fault for fault in self._faults.values() if fault is not None]
        if not faults:
            return PeerLostError("?", "no other peer holds the state: wait for one, or start from a checkpoint")
        text = "no source of the state is left: " + "; ".join(str(fault) for fault in faults)[:800]
        for kind in (IncompatibleError, IntegrityError, DeadlineError):
            if any(isinstance(fault, kind) for fault in faults):
                return kind(text)
        if any(isinstance(fault, ProtocolError) for fault in faults):
            return IntegrityError(text)
        if all(isinstance(fault, PeerRefusedError) for fault in faults):
            return PeerRefusedError("?", text)
        return PeerLostError("?", text)

    def _notify(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    # One source

    async def _use(self, source: PeerId) -> None:
        """Take chunks from one source until all is there or it is given up; then its fault says why."""
        attempts = 0
        try:
            while not self._partial.is_complete:
                before = self.bytes_from[source]
                try:
                    await self._converse(source)
                    continue
                except (NotFiniteError, ResourceError):
                    raise  # It is not the source's fault.
                except (ProtocolError, IntegrityError, IncompatibleError) as error:
                    self._rpc.count_refusal(source, "bad state")
                    logger.warning("state download: gave up peer %s: %s", source[-8:], error)
                    self._faults[source] = error
                    return
                except TemporaryError as error:
                    self._faults[source] = error
                finally:
                    if self._pool.give_back(source):
                        self._notify()
                attempts = 1 if self.bytes_from[source] > before else attempts + 1
                if attempts >= MAX_ATTEMPTS:
                    logger.info("state download: gave up peer %s: %s", source[-8:], self._faults[source])
                    return
                await asyncio.sleep(FIRST_RETRY_SECONDS * 2**attempts * (1 + self._runtime.random.random()))
        finally:
            self._pool.leave(source)
            # When this was the last source, the waiting main task has to see that it is done.
            asyncio.get_running_loop().call_soon(self._notify)

    async def _converse(self, source: PeerId) -> None:
        request = {"describe": not self._partial.specs}
        async with self._rpc.open(
            source, "state.chunks", request, self._times.open_seconds, expected_bytes=EXPECTED_BYTES
        ) as channel:
            await self._agree(source, channel, bool(request["describe"]))
            self._faults[source] = None
            await self._pull(source, channel)

    async def _agree(self, source: PeerId, channel: Channel, describe: bool) -> None:
        """Check that the source holds such a state, and take over its description if none is known yet.

        A description is proved by the proof of any chunk; no memory is given to the state before that.
        """
        hello = await channel.receive(dict, self._times.open_seconds, MAX_DESCRIPTION_BYTES)
        if hello.get("layout") != self._layout:
            raise IncompatibleError(f"peer {channel.remote[-8:]} trains a model of another shape")
        if describe:
            specs = specs_from_wire(hello.get("tensors"))
            cut = cut_of(specs)
            if not cut.num_chunks or cut.num_chunks != hello.get("num_chunks"):
                raise IntegrityError(f"peer {channel.remote[-8:]} described a state that is not cut as it says")
            self._admission.check_size(cut.num_bytes)
            buffer = memoryview(bytearray(stamped_bytes(cut.chunk_bytes(0), cut.depth)))
            await channel.send({"first": 0, "count": 1})
            await receive_steadily(channel, len(buffer), buffer, self._times.least)
            data, stamp, proof = _parts(buffer, cut.chunk_bytes(0))
            leaf = await self._runtime.offload(leaf_of, data)
            if not proves(description_hash(specs), leaf, 0, cut.num_chunks, proof, stamp.digest):
                raise IntegrityError(f"peer {channel.remote[-8:]} described a state that has not the digest asked for")
            await self._admission.admit(source, stamp)
            if not self._partial.specs:
                self._begin(specs)
                await self._keep(source, 0, data, stamp, proof)
        if hello.get("num_chunks") != self._partial.cut.num_chunks:
            raise TemporaryError(f"peer {channel.remote[-8:]} holds a state of other tensors")

    def _begin(self, specs: tuple[TensorSpec, ...]) -> None:
        self._partial.begin(specs)
        self._pool.fill(self._partial.done)
        self._notify()

    async def _pull(self, source: PeerId, channel: Channel) -> None:
        """Ask ahead, receive into one buffer while others are verified."""
        loop = asyncio.get_running_loop()
        cut = self._partial.cut
        size = stamped_bytes(CHUNK_BYTES, cut.depth)
        buffers = deque(memoryview(bytearray(size)) for _ in range(CHECKS_BEHIND + 1))
        asked: deque[list[int]] = deque()
        checks: deque[asyncio.Task[None]] = deque()
        async with Tasks() as tasks:
            while True:
                if len(asked) < RANGES_ASKED_AHEAD:
                    await self._admission.wait_for_turn()
                while len(asked) < RANGES_ASKED_AHEAD and (span := self._pool.take(source)):
                    await channel.send({"first": span[0], "count": len(span)})
                    asked.append(span)
                if not asked:
                    if checks:
                        await checks.popleft()
                        continue
                    if self._partial.is_complete:
                        return
                    await self._wait_for_work(channel)
                    continue
                started = loop.time()
                span = asked.popleft()
                for index in span:
                    if len(checks) == CHECKS_BEHIND:
                        await checks.popleft()
                    view = buffers[0][: stamped_bytes(cut.chunk_bytes(index), cut.depth)]
                    buffers.rotate()
                    await receive_steadily(channel, len(view), view, self._times.least)
                    checks.append(tasks.call(self._check(source, index, view), "check"))
                self._pool.adapt(source, loop.time() - started)

    async def _wait_for_work(self, channel: Channel) -> None:
        """Until the pool changes; a source that leaves meanwhile ends the conversation."""
        async with Tasks() as tasks:
            changed = tasks.call(self._changed.wait(), "changed")
            waited: list[asyncio.Future[Any]] = [changed, channel.lost]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if channel.lost.done() and not changed.done():
            await channel.receive(dict, 0.0)  # Raises what ended it.

    async def _check(self, source: PeerId, index: int, received: memoryview) -> None:
        data, stamp, proof = _parts(received, self._partial.cut.chunk_bytes(index))
        if stamp != self._admitted.get(source):  # Before anybody waits for a round that may be made up.
            if not await self._runtime.offload(self._partial.verifies, index, data, stamp, proof):
                raise IntegrityError(f"peer {source[-8:]} sent a chunk that does not match its hash")
            await self._admission.admit(source, stamp)
            self._admitted[source] = stamp
        await self._keep(source, index, data, stamp, proof)

    async def _keep(self, source: PeerId, index: int, data: memoryview, stamp: Stamp, proof: memoryview) -> None:
        if not await self._runtime.compute(self._partial.put, index, data, stamp, proof):
            raise IntegrityError(f"peer {source[-8:]} sent a chunk that does not match its hash")
        self.bytes_from[source] += len(data)
        self._pool.settle(source, index)
        self._advance(self._partial.bytes_done, self._partial.num_bytes)
        if self._partial.is_complete:
            self._notify()


def _parts(received: memoryview, chunk_bytes: int) -> tuple[memoryview, Stamp, memoryview]:
    """What arrives for one chunk: its bytes, stamp and proof."""
    end = chunk_bytes + Stamp.NUM_BYTES
    return received[:chunk_bytes], Stamp.from_bytes(received[chunk_bytes:end]), received[end:]
