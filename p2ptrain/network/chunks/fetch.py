"""Fetches chunks from several sources in parallel; the target verifies each chunk.

A fetch has no deadline, but each source must keep a minimum rate. `chunks.pool` assigns chunks to sources. Chunks
arrive in separate buffers, so only verified bytes reach the target.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

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
from p2ptrain.network.chunks.messages import Ask, Enough, Open, service
from p2ptrain.network.chunks.pool import ChunkPool
from p2ptrain.network.rpc.channel import Channel, LeastRate
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.transport import PeerId
from p2ptrain.tasks import Backoff, Tasks

logger = logging.getLogger(__name__)

RUNS_ASKED_AHEAD = 2
CHECKS_BEHIND = 3
"""Most chunks in verification while the next one arrives."""
FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 0.75, 6.0
REPLACE_SECONDS = 60.0
"""Interval between replacements of the slowest source by an untried one."""
LOOK_SECONDS = 2.0
"""Interval between searches for further sources."""
CLOSE_SECONDS = 0.1
"""Grace period for channels to close after the last chunk, so that their connections can be reused."""


class BadContentError(IntegrityError):
    """The target refused a chunk that matches its hash: no source is at fault."""


class Target(Protocol):
    """The receiver of chunks: it verifies and keeps them, and can continue after a failed fetch.

    Attributes:
        done: 1 for each chunk that is in place; empty until the number of chunks is known.
        most_bytes: Largest chunk on the wire.
        expected_bytes: Estimate of all bytes on the wire, for the transport.
        asks_at_once: True to request chunks before the source sends its description.
    """

    @property
    def done(self) -> bytes | bytearray: ...
    @property
    def is_complete(self) -> bool: ...
    @property
    def most_bytes(self) -> int: ...
    @property
    def expected_bytes(self) -> int: ...
    @property
    def asks_at_once(self) -> bool: ...

    def wire_bytes(self, index: int) -> int:
        """Return the size of a chunk on the wire."""

    async def agree(self, channel: Channel, options: FetchOptions) -> int:
        """Receive and check a source's description; return the bytes of chunks that came with it.

        Raises `TemporaryError` if the source is unusable for now; `IntegrityError`, `ProtocolError` or
        `IncompatibleError` if it is for good.
        """

    async def put(self, source: PeerId, index: int, received: memoryview) -> int:
        """Verify and keep a chunk; return the bytes to credit to the source.

        Raises `IntegrityError` if the chunk is wrong, `TemporaryError` if it is unusable for now, and `BadContentError`
        or `ResourceError` if the fetch cannot succeed.
        """

    async def wait_for_turn(self) -> None:
        """Return once no more urgent traffic needs the link; called before each request."""


@dataclass(frozen=True)
class FetchOptions:
    """Deadlines and bounds of a fetch."""

    open_seconds: float = 10.0
    """Timeout for opening a channel to a source; targets also use it for the description."""
    least: LeastRate = field(default_factory=LeastRate)
    """Minimum rate of a source; a slower one counts as stalled."""
    max_sources: int = 4
    attempts: int = 3
    """Limit of a source's consecutive failures."""
    first_span: int = 1
    """Length of a source's first run, in chunks."""
    waits: bool = False
    """See `Open.waits`."""
    plan: Mapping[PeerId, Sequence[int]] = field(default_factory=dict)
    """The chunks of each source; empty if any source may send any chunk."""


@dataclass(frozen=True)
class FetchReport:
    """The verified bytes and the last fault of each source."""

    bytes_from: dict[PeerId, int]
    faults: dict[PeerId, P2PTrainError]

    @property
    def liars(self) -> list[PeerId]:
        """The sources with an integrity or protocol fault."""
        return [peer for peer, fault in self.faults.items() if isinstance(fault, IntegrityError | ProtocolError)]


async def fetch(
    rpc: Rpc,
    name: str,
    key: bytes,
    target: Target,
    find_sources: Callable[[], Sequence[PeerId]],
    options: FetchOptions | None = None,
) -> FetchReport:
    """Fetch the missing chunks of ``target`` in parallel.

    Args:
        name: Name of the sources' `ChunkServer`.
        target: Filled as chunks arrive, even if this raises.
        find_sources: Returns peers to ask, in order of preference; called repeatedly.

    Raises:
        IncompatibleError, IntegrityError, DeadlineError, PeerRefusedError, PeerLostError: No source is left, and this
            is the most specific of their faults: one was incompatible, sent wrong data or was too slow; or all refused.
        BadContentError, ResourceError: The content itself is bad; there is not enough memory or disk.
    """
    transfer = _Fetch(rpc, name, key, target, find_sources, options or FetchOptions())
    await transfer.run()
    return transfer.report()


@dataclass
class _Fetch:
    """One fetch: a pool of chunks, and one task per source."""

    rpc: Rpc
    name: str
    key: bytes
    target: Target
    find_sources: Callable[[], Sequence[PeerId]]
    options: FetchOptions

    def __post_init__(self) -> None:
        self._pool = ChunkPool(self.options.first_span, self.options.plan)
        self._faults: dict[PeerId, P2PTrainError | None] = {}
        self._tasks: dict[PeerId, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._rested: set[PeerId] = set()
        self._receiving: set[PeerId] = set()
        self._replace_at = asyncio.get_running_loop().time() + REPLACE_SECONDS
        self._before: Counter[PeerId] = Counter()
        self._bytes_from: Counter[PeerId] = Counter()
        if self.target.done:
            self._pool.fill(self.target.done)

    def report(self) -> FetchReport:
        faults = {source: fault for source, fault in self._faults.items() if fault is not None}
        return FetchReport(dict(self._bytes_from), faults)

    async def run(self) -> None:
        async with Tasks() as tasks:
            while not self.target.is_complete and self._start_sources(tasks):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._changed.wait()
            for source in self._receiving:
                self._tasks[source].cancel()
            await tasks.close(CLOSE_SECONDS)
        if not self.target.is_complete:
            raise self._verdict()

    def _start_sources(self, tasks: Tasks) -> bool:
        """Start further sources, up to the limit; return True if any source is running."""
        found = [source for source in self.find_sources() if source != self.rpc.peer_id]
        fresh = [source for source in found if source not in self._tasks]
        running = [source for source, task in self._tasks.items() if not task.done()]
        if fresh and len(running) >= self.options.max_sources:
            self._rest_slowest(running)
        rested = [source for source in found if source in self._rested and self._tasks[source].done()]
        for source in [*fresh, *rested][: max(0, self.options.max_sources - len(running))]:
            self._rested.discard(source)
            self._faults[source] = None
            self._pool.join(source)
            self._tasks[source] = tasks.start(self._use(source), f"{self.name}-from-{source[-8:]}")
            running.append(source)
        return bool(running)

    def _rest_slowest(self, running: list[PeerId]) -> None:
        """Every `REPLACE_SECONDS`, stop the source that sent least in the interval, for an untried one."""
        now = asyncio.get_running_loop().time()
        if now < self._replace_at:
            return
        slowest = min(running, key=lambda source: self._bytes_from[source] - self._before[source])
        logger.info("%s: peer %s gives its place to another source", self.name, slowest[-8:])
        self._tasks[slowest].cancel()
        self._rested.add(slowest)
        running.remove(slowest)
        self._replace_at, self._before = now + REPLACE_SECONDS, Counter(self._bytes_from)

    def _verdict(self) -> P2PTrainError:
        """Return the most specific of the sources' faults, with all faults in its message."""
        faults = list(self.report().faults.values())
        if not faults:
            return PeerLostError("?", f"no other peer has the {self.name}: wait for one, or start from a checkpoint")
        text = f"no source of the {self.name} is left: " + "; ".join(map(str, faults))[:800]
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

    # --- one source -----------------------------------------------------------------------------------------------

    async def _use(self, source: PeerId) -> None:
        attempts, backoff = 0, Backoff(FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS, self.rpc.runtime.random)
        try:
            while not self.target.is_complete:
                run = self._pool.take(source)
                if not run and self._pool.is_filled:
                    await self._changed.wait()
                    continue
                before = self._bytes_from[source]
                self._receiving.add(source)
                try:
                    await self._converse(source, run)
                    continue
                except (BadContentError, ResourceError):
                    raise  # not the source's fault
                except (ProtocolError, IntegrityError, IncompatibleError) as error:
                    self.rpc.count_refusal(source, f"bad {self.name}")
                    logger.warning("%s: gave up peer %s: %s", self.name, source[-8:], error)
                    self._faults[source] = error
                    return
                except TemporaryError as error:
                    self._faults[source] = error
                finally:
                    if self._pool.give_back(source):
                        self._notify()
                if self._bytes_from[source] > before:
                    attempts = 0
                    backoff.reset()
                attempts += 1
                if attempts >= self.options.attempts:
                    logger.info("%s: gave up peer %s: %s", self.name, source[-8:], self._faults[source])
                    return
                await asyncio.sleep(backoff.next())
        finally:
            self._pool.leave(source)
            # Wake the main task after this one has ended, because this may be the last source.
            asyncio.get_running_loop().call_soon(self._notify)

    async def _converse(self, source: PeerId, run: list[int]) -> None:
        target, asked = self.target, deque[list[int]]()
        request = Open(self.key, self.options.waits)
        async with self.rpc.open(
            source, service(self.name), request, self.options.open_seconds, expected_bytes=target.expected_bytes
        ) as channel:
            asking = not target.asks_at_once or await self._ask(channel, asked, run)
            self._bytes_from[source] += await target.agree(channel, self.options)
            self._faults[source] = None
            if not self._pool.is_filled:
                self._pool.fill(target.done)
                self._notify()
            if not target.asks_at_once:
                asking = await self._ask(channel, asked, run)
            await self._pull(channel, asked, asking)
            self._receiving.discard(source)

    async def _ask(self, channel: Channel, asked: deque[list[int]], run: list[int] | None = None) -> bool:
        """Request runs, ``run`` first, up to `RUNS_ASKED_AHEAD` in ``asked``; False once no chunks are left."""
        await self.target.wait_for_turn()
        while len(asked) < RUNS_ASKED_AHEAD:
            if not (run := run or self._pool.take(channel.remote)):
                await channel.send(Enough())
                return False
            await channel.send(Ask(run))
            asked.append(run)
            run = None
        return True

    async def _pull(self, channel: Channel, asked: deque[list[int]], asking: bool) -> None:
        """Receive chunks into one buffer while the target verifies others."""
        loop, target = asyncio.get_running_loop(), self.target
        buffers = deque(memoryview(bytearray(target.most_bytes)) for _ in range(CHECKS_BEHIND + 1))
        checks: deque[asyncio.Task[None]] = deque()
        async with Tasks() as tasks:
            while asked:
                started, run = loop.time(), asked.popleft()
                for index in run:
                    if len(checks) == CHECKS_BEHIND:
                        await checks.popleft()
                    view = buffers[0][: target.wire_bytes(index)]
                    buffers.rotate()
                    await channel.receive_steadily(view, self.options.least)
                    checks.append(tasks.call(self._check(channel.remote, index, view), "check"))
                self._pool.adapt(channel.remote, loop.time() - started)
                if asking:
                    asking = await self._ask(channel, asked)
            for check in checks:
                await check

    async def _check(self, source: PeerId, index: int, received: memoryview) -> None:
        self._bytes_from[source] += await self.target.put(source, index, received)
        self._pool.settle(source, index)
        if self.target.is_complete:
            self._notify()
