"""Download of a whole state from several peers at once, each chunk verified against the digest.

One channel a source, ``state.chunks``. The digest that a certificate vouches for covers the description and the hashes
of all chunks, so after these are checked any peer may send any chunk, and a lie is found within 1 MiB::

    newcomer                                             source
      | {lineage, layout, describe}                        |  takes a lease; or refuses: "moved on to round N"
      |                     {layout, tensors, num_chunks}  |
      | {leaves}  -> 32 bytes a chunk                      |
      | {first, count}, {first, count} (asked ahead) ->    |  each chunk as one bulk buffer
      | END                                                |

Sources take ranges from one pool; a range whose source dies goes back, and one that a slow source holds at the end is
asked of another as well. What arrives goes through a buffer of its own, so that only verified bytes touch the result.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from p2ptrain.averaging.head import Head
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
from p2ptrain.hashing import HASH_BYTES
from p2ptrain.network.channel import Channel
from p2ptrain.network.rpc import Rpc
from p2ptrain.network.transport import PeerId
from p2ptrain.runtime import Runtime
from p2ptrain.training.digest import (
    CHUNK_BYTES,
    ChunkedBytes,
    TensorSpec,
    new_tensors,
    num_chunks,
    root_of,
    specs_from_wire,
    verify_chunk,
)
from p2ptrain.training.state import MOVED_ON
from p2ptrain.training.state_server import MAX_RANGE_CHUNKS, ServeLimits, StateServer

__all__ = [
    "DownloadedState",
    "PartialDownload",
    "ServeLimits",
    "StateServer",
    "TransferTimes",
    "download_state",
    "fetch_head",
]

logger = logging.getLogger(__name__)

MAX_DESCRIPTION_BYTES = 16 << 20
RANGES_ASKED_AHEAD = 2
CHECKS_BEHIND = 3
"""Chunks that may wait for their verification while the next one arrives."""
STOLEN_CHUNKS = 2
MAX_HOLDERS = 2
MAX_ATTEMPTS = 3
FIRST_RETRY_SECONDS = 0.25
QUICK_RANGE_SECONDS = 1.0
SLOW_RANGE_SECONDS = 3.0


async def fetch_head(rpc: Rpc, source: PeerId, timeout_seconds: float = 10.0) -> Head:
    """Ask a peer where its lineage stands; the caller checks the certificate.

    Raises:
        PeerError: The peer cannot be reached, refuses, or answers nonsense.
        IntegrityError: The head is malformed.
        DeadlineError: No answer in time.
    """
    reply = await rpc.call(source, "state.info", {}, timeout_seconds, max_reply_bytes=4 << 20)
    return Head.from_dict(reply.get("head"))


class PartialDownload:
    """What a download has so far; pass it to the next `download_state` to go on where it stopped.

    Attributes:
        digest: Which state; empty before a first source was heard.
        specs: Its tensors.
        leaves: Hashes of its chunks.
        tensors: Where its bytes go.
        done: For each chunk, 1 once it is verified and in place.
    """

    def __init__(self) -> None:
        self.digest = b""
        self.specs: tuple[TensorSpec, ...] = ()
        self.leaves: list[bytes] = []
        self.tensors: list[tuple[str, Tensor]] = []
        self.done = bytearray()
        self._chunks: ChunkedBytes | None = None

    @property
    def num_done(self) -> int:
        """Chunks in place."""
        return self.done.count(1)

    def begin(self, digest: bytes, specs: tuple[TensorSpec, ...], leaves: list[bytes]) -> None:
        """Make room for a state whose description is verified; raises `ResourceError` when there is none."""
        try:
            tensors = new_tensors(specs)
        except MemoryError as error:
            needed = sum(spec.num_bytes for spec in specs) >> 20
            raise ResourceError(f"no memory for a state of {needed} MiB: close other programs") from error
        self.digest, self.specs, self.leaves, self.tensors = digest, specs, leaves, tensors
        self.done = bytearray(len(leaves))
        self._chunks = ChunkedBytes(tensors)

    def chunk_bytes(self, index: int) -> int:
        """Size of a chunk."""
        assert self._chunks is not None
        return self._chunks.chunk_bytes(index)

    def put(self, index: int, data: memoryview) -> bool:
        """Verify a chunk and put it in place; False when its hash is wrong."""
        assert self._chunks is not None
        if self.done[index]:
            return True
        if not verify_chunk(index, data, self.leaves):
            return False
        self._chunks.write(index, data)
        self.done[index] = 1
        return True


@dataclass(frozen=True)
class DownloadedState:
    """A state whose every byte is verified.

    Attributes:
        head: The head it belongs to, as it was asked for.
        tensors: What `SharedState.replace` takes.
        bytes_from: Verified bytes by source.
        faults: Why sources were given up.
    """

    head: Head
    tensors: list[tuple[str, Tensor]]
    bytes_from: dict[PeerId, int]
    faults: dict[PeerId, str]


@dataclass(frozen=True)
class TransferTimes:
    """Deadlines within a download."""

    open_seconds: float = 10.0
    """Dialling a source and hearing its description; and again for the hashes."""
    chunk_seconds: float = 30.0
    """The next chunk of 1 MiB: what is slower counts as stalled."""


async def download_state(
    rpc: Rpc,
    runtime: Runtime,
    sources: list[PeerId],
    expect: Head,
    layout_fingerprint: bytes,
    timeout_seconds: float,
    resume: PartialDownload | None = None,
    times: TransferTimes | None = None,
) -> DownloadedState:
    """Download the state that ``expect`` names from ``sources``, in parallel.

    Args:
        rpc: To reach them; lies are counted in its ``refusals``.
        runtime: Hashes off the event loop.
        sources: Peers that hold it; this peer itself is left out.
        expect: Whose ``lineage`` and ``digest`` are trusted already.
        layout_fingerprint: This model's; a state of another shape is refused.
        timeout_seconds: Deadline of it all.
        resume: Filled as chunks arrive, also when this raises; a state begun earlier is completed, not begun anew.
        times: Deadlines within.

    Raises:
        IncompatibleError: No source is left, and one holds the state of another model.
        IntegrityError: No source is left, and one sent what the digest does not vouch for.
        PeerRefusedError: No source is left; all moved on to later rounds, or refuse.
        PeerLostError: No source is left.
        DeadlineError: It took too long, or every source stalls.
        ResourceError: There is no memory for it.
    """
    partial = resume if resume is not None else PartialDownload()
    if partial.digest != expect.digest:
        partial.digest = b""
    peers = [peer for peer in dict.fromkeys(sources) if peer != rpc.peer_id]
    if not peers:
        raise PeerLostError("?", "no other peer holds the state: wait for one, or start from a checkpoint")
    download = _Download(rpc, runtime, expect, layout_fingerprint, partial, times or TransferTimes())
    await download.run(peers, timeout_seconds)
    return DownloadedState(expect, partial.tensors, dict(download.bytes_from), download.fault_texts())


@dataclass
class _Source:
    peer: PeerId
    span: int = 1
    outstanding: list[int] = field(default_factory=list)
    fault: P2PTrainError | None = None


class _Download:
    """One download: a pool of chunks, and one task a source that empties it."""

    def __init__(
        self, rpc: Rpc, runtime: Runtime, expect: Head, layout: bytes, partial: PartialDownload, times: TransferTimes
    ) -> None:
        self._rpc = rpc
        self._runtime = runtime
        self._expect = expect
        self._layout = layout
        self._partial = partial
        self._times = times
        self._pending: deque[int] = deque()
        self._sources: list[_Source] = []
        self._changed = asyncio.Event()
        self.bytes_from: Counter[PeerId] = Counter()
        if partial.digest:
            self._fill_pool()

    def fault_texts(self) -> dict[PeerId, str]:
        """Why sources were given up."""
        return {source.peer: str(source.fault) for source in self._sources if source.fault is not None}

    async def run(self, peers: list[PeerId], timeout_seconds: float) -> None:
        """Return when all is there; see `download_state` for what is raised."""
        self._sources = [_Source(peer) for peer in peers]
        try:
            async with asyncio.timeout(timeout_seconds), asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._use(source)) for source in self._sources]
                while not self._is_complete() and not all(task.done() for task in tasks):
                    await self._changed.wait()
                for task in tasks:
                    task.cancel()
        except TimeoutError:
            raise DeadlineError(
                f"the state did not arrive within {timeout_seconds:g} s"
                f" ({self._partial.num_done} of {len(self._partial.done)} chunks did): try again"
            ) from None
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        if not self._is_complete():
            raise self._verdict()

    def _is_complete(self) -> bool:
        return bool(self._partial.digest) and self._partial.num_done == len(self._partial.done)

    def _verdict(self) -> P2PTrainError:
        """The most telling of the sources' faults, with all of them in its message."""
        faults = [source.fault for source in self._sources if source.fault is not None]
        text = "no source of the state is left: " + "; ".join(str(fault) for fault in faults)[:800]
        for kind in (IncompatibleError, IntegrityError, DeadlineError):
            if any(isinstance(fault, kind) for fault in faults):
                return kind(text)
        if any(isinstance(fault, ProtocolError) for fault in faults):
            return IntegrityError(text)
        if faults and all(isinstance(fault, PeerRefusedError) for fault in faults):
            return PeerRefusedError("?", text)
        return PeerLostError("?", text)

    def _notify(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    # One source

    async def _use(self, source: _Source) -> None:
        """Take chunks from one source until all is there or it is given up; then ``source.fault`` says why."""
        attempts = 0
        try:
            while not self._is_complete():
                before = self.bytes_from[source.peer]
                try:
                    await self._converse(source)
                    continue
                except (ProtocolError, IntegrityError, IncompatibleError) as error:
                    self._rpc.count_refusal(source.peer, "bad state")
                    logger.warning("state download: gave up peer %s: %s", source.peer[-8:], error)
                    source.fault = error
                    return
                except TemporaryError as error:
                    source.fault = error
                    if isinstance(error, PeerRefusedError) and MOVED_ON in error.reason:
                        return
                finally:
                    self._give_back(source)
                attempts = 1 if self.bytes_from[source.peer] > before else attempts + 1
                if attempts >= MAX_ATTEMPTS:
                    logger.info("state download: gave up peer %s: %s", source.peer[-8:], source.fault)
                    return
                await asyncio.sleep(FIRST_RETRY_SECONDS * 2**attempts * (1 + self._runtime.random.random()))
        finally:
            # When this was the last source, the waiting main task has to see that it is done.
            asyncio.get_running_loop().call_soon(self._notify)

    async def _converse(self, source: _Source) -> None:
        request = {"lineage": self._expect.lineage, "describe": not self._partial.digest}
        async with self._rpc.open(source.peer, "state.chunks", request, self._times.open_seconds) as channel:
            await self._agree(channel, bool(request["describe"]))
            source.fault = None
            await self._pull(source, channel)

    async def _agree(self, channel: Channel, describe: bool) -> None:
        """Check that the source holds the state, and take over description and hashes if they are not known yet."""
        hello = await channel.receive(self._times.open_seconds, MAX_DESCRIPTION_BYTES)
        if hello.get("layout") != self._layout:
            raise IncompatibleError(f"peer {channel.remote[-8:]} trains a model of another shape")
        if not describe or self._partial.digest:
            return
        specs = specs_from_wire(hello.get("tensors"))
        num_leaves = num_chunks(sum(spec.num_bytes for spec in specs))
        await channel.send({"leaves": True})
        data = bytes(await channel.receive_bytes(num_leaves * HASH_BYTES, self._times.open_seconds))
        leaves = [data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)]
        if await self._runtime.compute(root_of, specs, leaves) != self._expect.digest:
            raise IntegrityError(f"peer {channel.remote[-8:]} described a state that has not the digest asked for")
        if not self._partial.digest:
            self._partial.begin(self._expect.digest, specs, leaves)
            self._fill_pool()
            self._notify()

    async def _pull(self, source: _Source, channel: Channel) -> None:
        """Ask ahead, receive into one buffer while others are verified."""
        loop = asyncio.get_running_loop()
        buffers = deque(memoryview(bytearray(CHUNK_BYTES)) for _ in range(CHECKS_BEHIND + 1))
        asked: deque[list[int]] = deque()
        checks: deque[asyncio.Task[None]] = deque()
        try:
            while True:
                while len(asked) < RANGES_ASKED_AHEAD and (span := self._take(source)):
                    await channel.send({"first": span[0], "count": len(span)})
                    asked.append(span)
                if not asked:
                    if checks:
                        await checks.popleft()
                        continue
                    if self._is_complete():
                        return
                    await self._wait_for_work(channel)
                    continue
                started = loop.time()
                span = asked.popleft()
                for index in span:
                    if len(checks) == CHECKS_BEHIND:
                        await checks.popleft()
                    view = buffers[0][: self._partial.chunk_bytes(index)]
                    buffers.rotate()
                    await channel.receive_bytes(len(view), self._times.chunk_seconds, into=view)
                    checks.append(asyncio.create_task(self._check(source, index, view)))
                self._adapt(source, loop.time() - started)
        finally:
            for check in checks:
                check.cancel()
            await asyncio.gather(*checks, return_exceptions=True)

    async def _wait_for_work(self, channel: Channel) -> None:
        """Until the pool changes; a source that leaves meanwhile ends the conversation."""
        changed = asyncio.create_task(self._changed.wait())
        waited: list[asyncio.Future[Any]] = [changed, channel.lost]
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        if channel.lost.done() and not changed.done():
            await channel.receive(0.0)  # Raises what ended it.

    async def _check(self, source: _Source, index: int, data: memoryview) -> None:
        if not await self._runtime.compute(self._partial.put, index, data):
            raise IntegrityError(f"peer {source.peer[-8:]} sent a chunk that does not match its hash")
        self.bytes_from[source.peer] += len(data)
        source.outstanding.remove(index)
        if self._is_complete():
            self._notify()

    # The pool

    def _fill_pool(self) -> None:
        self._pending = deque(index for index, done in enumerate(self._partial.done) if not done)

    def _take(self, source: _Source) -> list[int]:
        """The next run of chunks for ``source``; at the end, some that another still owes."""
        # Smaller and smaller towards the end, so that all sources finish together.
        limit = min(source.span, max(1, len(self._pending) // (2 * len(self._sources))))
        span: list[int] = []
        while self._pending and len(span) < limit and (not span or self._pending[0] == span[-1] + 1):
            span.append(self._pending.popleft())
        if not span:
            span = self._steal(source)
        source.outstanding.extend(span)
        return span

    def _steal(self, thief: _Source) -> list[int]:
        holders = Counter(index for source in self._sources for index in source.outstanding)
        best: list[int] = []
        for source in self._sources:
            if source is thief:
                continue
            owed = [
                index for index in source.outstanding if holders[index] < MAX_HOLDERS and not self._partial.done[index]
            ]
            best = max(best, owed, key=len)
        # From its end: what was asked for last arrives last.
        span: list[int] = []
        for index in sorted(best, reverse=True):
            if len(span) == min(thief.span, STOLEN_CHUNKS) or (span and index != span[-1] - 1):
                break
            span.append(index)
        return span[::-1]

    def _give_back(self, source: _Source) -> None:
        held = {index for other in self._sources if other is not source for index in other.outstanding}
        lost = [index for index in source.outstanding if not self._partial.done[index] and index not in held]
        source.outstanding.clear()
        source.span = 1
        if lost:
            self._pending = deque(sorted({*self._pending, *lost}))
            self._notify()

    def _adapt(self, source: _Source, seconds: float) -> None:
        if seconds < QUICK_RANGE_SECONDS:
            source.span = min(2 * source.span, MAX_RANGE_CHUNKS)
        elif seconds > SLOW_RANGE_SECONDS:
            source.span = max(1, source.span // 2)
