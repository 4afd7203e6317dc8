"""Download of a whole state from several peers at once, each chunk verified against the digest.

One channel a source, ``state.chunks``. The digest that a certificate vouches for covers the description and the hashes
of all chunks, so after these are checked any peer may send any chunk, and a lie is found within 1 MiB::

    newcomer                                             source
      | {lineage, layout, describe}                        |  takes a lease; or refuses: "moved on to round N"
      |                     {layout, tensors, num_chunks}  |
      | {leaves}  -> 32 bytes a chunk                      |
      | {first, count}, {first, count} (asked ahead) ->    |  each chunk as one bulk buffer
      | END                                                |

What is asked of whom is decided by `p2ptrain.training.chunk_pool`. What has arrived is in a `PartialDownload`, which
outlives a download that fails. Chunks go through buffers of their own, so that only verified bytes touch the result.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from dataclasses import dataclass
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
    TemporaryError,
)
from p2ptrain.hashing import HASH_BYTES
from p2ptrain.jobs import Advance
from p2ptrain.network.channel import Channel
from p2ptrain.network.rpc import Rpc
from p2ptrain.network.transport import PeerId
from p2ptrain.runtime import Runtime
from p2ptrain.training.chunk_pool import ChunkPool
from p2ptrain.training.digest import CHUNK_BYTES, num_chunks, root_of, specs_from_wire
from p2ptrain.training.partial_download import PartialDownload
from p2ptrain.training.state import MOVED_ON
from p2ptrain.training.state_server import ServeLimits, StateServer

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
EXPECTED_BYTES = 64 << 20
"""What a transport is told to expect: how much a state is turns out on the stream, but it is never little."""
RANGES_ASKED_AHEAD = 2
CHECKS_BEHIND = 3
"""Chunks that may wait for their verification while the next one arrives."""
MAX_ATTEMPTS = 3
FIRST_RETRY_SECONDS = 0.25


async def fetch_head(rpc: Rpc, source: PeerId, oldest_round: int = 0, timeout_seconds: float = 10.0) -> Head:
    """Ask a peer which state it offers; the caller checks the certificate.

    The peer keeps that state for a moment, so that a download can begin however fast its rounds are.

    Args:
        rpc: To reach the peer.
        source: The peer.
        oldest_round: What others download already may be offered, but nothing older than this round.
        timeout_seconds: Deadline.

    Raises:
        PeerError: The peer cannot be reached, refuses, or answers nonsense.
        IntegrityError: The head is malformed.
        DeadlineError: No answer in time.
    """
    reply = await rpc.call(
        source, "state.info", {"oldest_round": oldest_round}, timeout_seconds, max_reply_bytes=4 << 20
    )
    return Head.from_dict(reply.get("head"))


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
    advance: Advance = lambda done, total: None,
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
        advance: Told how many bytes of it are verified, and of how many.

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
    download = _Download(rpc, runtime, expect, layout_fingerprint, partial, times or TransferTimes(), peers, advance)
    await download.run(timeout_seconds)
    return DownloadedState(expect, partial.tensors, dict(download.bytes_from), download.fault_texts())


class _Download:
    """One download: a pool of chunks, and one task a source that empties it."""

    def __init__(
        self,
        rpc: Rpc,
        runtime: Runtime,
        expect: Head,
        layout: bytes,
        partial: PartialDownload,
        times: TransferTimes,
        sources: list[PeerId],
        advance: Advance,
    ) -> None:
        self._rpc = rpc
        self._runtime = runtime
        self._expect = expect
        self._layout = layout
        self._partial = partial
        self._times = times
        self._advance = advance
        self._pool = ChunkPool(sources)
        self._faults: dict[PeerId, P2PTrainError | None] = dict.fromkeys(sources)
        self._changed = asyncio.Event()
        self.bytes_from: Counter[PeerId] = Counter()
        if partial.digest:
            self._pool.fill(partial.done)

    def fault_texts(self) -> dict[PeerId, str]:
        """Why sources were given up."""
        return {source: str(fault) for source, fault in self._faults.items() if fault is not None}

    async def run(self, timeout_seconds: float) -> None:
        """Return when all is there; see `download_state` for what is raised."""
        try:
            async with asyncio.timeout(timeout_seconds), asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._use(source)) for source in self._faults]
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
        faults = [fault for fault in self._faults.values() if fault is not None]
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

    async def _use(self, source: PeerId) -> None:
        """Take chunks from one source until all is there or it is given up; then its fault says why."""
        attempts = 0
        try:
            while not self._is_complete():
                before = self.bytes_from[source]
                try:
                    await self._converse(source)
                    continue
                except (ProtocolError, IntegrityError, IncompatibleError) as error:
                    self._rpc.count_refusal(source, "bad state")
                    logger.warning("state download: gave up peer %s: %s", source[-8:], error)
                    self._faults[source] = error
                    return
                except TemporaryError as error:
                    self._faults[source] = error
                    if isinstance(error, PeerRefusedError) and MOVED_ON in error.reason:
                        return
                finally:
                    if self._pool.give_back(source):
                        self._notify()
                attempts = 1 if self.bytes_from[source] > before else attempts + 1
                if attempts >= MAX_ATTEMPTS:
                    logger.info("state download: gave up peer %s: %s", source[-8:], self._faults[source])
                    return
                await asyncio.sleep(FIRST_RETRY_SECONDS * 2**attempts * (1 + self._runtime.random.random()))
        finally:
            # When this was the last source, the waiting main task has to see that it is done.
            asyncio.get_running_loop().call_soon(self._notify)

    async def _converse(self, source: PeerId) -> None:
        request = {"lineage": self._expect.lineage, "describe": not self._partial.digest}
        async with self._rpc.open(
            source, "state.chunks", request, self._times.open_seconds, expected_bytes=EXPECTED_BYTES
        ) as channel:
            await self._agree(channel, bool(request["describe"]))
            self._faults[source] = None
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
            self._pool.fill(self._partial.done)
            self._notify()

    async def _pull(self, source: PeerId, channel: Channel) -> None:
        """Ask ahead, receive into one buffer while others are verified."""
        loop = asyncio.get_running_loop()
        buffers = deque(memoryview(bytearray(CHUNK_BYTES)) for _ in range(CHECKS_BEHIND + 1))
        asked: deque[list[int]] = deque()
        checks: deque[asyncio.Task[None]] = deque()
        try:
            while True:
                while len(asked) < RANGES_ASKED_AHEAD and (span := self._pool.take(source)):
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
                self._pool.adapt(source, loop.time() - started)
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

    async def _check(self, source: PeerId, index: int, data: memoryview) -> None:
        if not await self._runtime.compute(self._partial.put, index, data):
            raise IntegrityError(f"peer {source[-8:]} sent a chunk that does not match its hash")
        self.bytes_from[source] += len(data)
        self._pool.settle(source, index)
        self._advance(self._partial.bytes_done, self._partial.num_bytes)
        if self._is_complete():
            self._notify()
