"""Fetches chunks from several sources at once; the target verifies each one.

There is no deadline: a fetch goes on while its sources send at a least rate. `p2ptrain.network.chunks.pool` decides
which source is asked for which chunks. Chunks go through buffers of their own: only verified bytes touch the target.
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
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.network.rpc.pace import LEAST_RATE, LeastRate, receive_steadily
from p2ptrain.network.transport import PeerId
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)

RUNS_ASKED_AHEAD = 2
CHECKS_BEHIND = 3
"""Chunks that may wait for their verification while the next one arrives."""
FIRST_RETRY_SECONDS = 0.25
REPLACE_SECONDS = 60.0
"""Between two times that the slowest source gives its place to one that was not asked yet."""
LOOK_SECONDS = 2.0
"""Between two looks for further sources."""
CLOSE_SECONDS = 0.1
"""For channels to close well once all is there, so that their connections can be used again."""


class BadContentError(IntegrityError):
    """A chunk that matches its hash is refused: no source is to blame."""


class Target(Protocol):
    """The receiver of chunks. It verifies and keeps them, and outlives a fetch that fails.

    Attributes:
        done: By chunk: 1 once it is there; empty until it is known which chunks there are.
        is_complete: Whether all is there.
        most_bytes: Of a chunk on the wire.
        expected_bytes: About what will come in all; what a transport is told.
        asks_at_once: Whether chunks are asked for before a source has described what it has.
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
        """Receive a source's description, and check it; return how many bytes of chunks came with it.

        Raises:
            IntegrityError, ProtocolError, IncompatibleError: The source is of no use.
            TemporaryError: It is of no use now.
        """

    async def put(self, source: PeerId, index: int, received: memoryview) -> int:
        """Verify a chunk and keep it; return how many bytes of it count.

        Raises:
            IntegrityError: The source lied.
            TemporaryError: The chunk is of no use now.
            BadContentError, ResourceError: The fetch cannot succeed.
        """

    async def wait_for_turn(self) -> None:
        """Return once nothing more urgent needs the link; called before chunks are asked for."""


@dataclass(frozen=True)
class FetchOptions:
    """Deadlines and bounds of a fetch."""

    open_seconds: float = 10.0
    """Dialling a source; and hearing its description."""
    least: LeastRate = LEAST_RATE
    """The least rate of a source; slower ones count as stalled."""
    max_sources: int = 4
    """Asked at the same time."""
    attempts: int = 3
    """Failures in a row after which a source is given up."""
    first_span: int = 1
    """Chunks that a source is asked for at first."""
    waits: bool = False
    """Whether sources may wait until they know of what is asked for."""
    plan: Mapping[PeerId, Sequence[int]] = field(default_factory=dict)
    """Which source is asked for which chunks; empty where any may send any."""


@dataclass(frozen=True)
class FetchReport:
    """The outcome of a fetch.

    Attributes:
        bytes_from: Verified bytes by source.
        faults: Why sources were given up.
    """

    bytes_from: dict[PeerId, int]
    faults: dict[PeerId, P2PTrainError]

    @property
    def liars(self) -> list[PeerId]:
        """Sources that sent what their hashes do not vouch for."""
        return [peer for peer, fault in self.faults.items() if isinstance(fault, IntegrityError | ProtocolError)]


async def fetch(
    rpc: Rpc,
    name: str,
    key: bytes,
    target: Target,
    find_sources: Callable[[], Sequence[PeerId]],
    options: FetchOptions | None = None,
) -> FetchReport:
    """Fetch the chunks that ``target`` lacks, in parallel, until it has all.

    Args:
        rpc: To reach sources; lies are counted in its ``refusals``.
        name: Under which `p2ptrain.network.chunks.server.ChunkServer` serves them.
        key: Of what is fetched.
        target: Filled as chunks arrive, also when this raises.
        find_sources: The peers to be asked, in order of preference; called again and again, since peers come and go.
        options: Deadlines and bounds.

    Raises:
        IncompatibleError: No source is left, and one holds something else.
        IntegrityError: No source is left, and one lied; or the content itself is bad.
        PeerRefusedError: No source is left; all refuse.
        PeerLostError: No source is left.
        DeadlineError: No source is left, and one sent too little.
        ResourceError: There is no memory or no disk for it.
    """
    transfer = _Fetch(rpc, name, key, target, find_sources, options or FetchOptions())
    await transfer.run()
    return transfer.report()


class _Fetch:
    """One fetch: a pool of chunks, and one task a source that empties it."""

    def __init__(
        self,
        rpc: Rpc,
        name: str,
        key: bytes,
        target: Target,
        find_sources: Callable[[], Sequence[PeerId]],
        options: FetchOptions,
    ) -> None:
        self._rpc = rpc
        self._name = name
        self._key = key
        self._target = target
        self._find_sources = find_sources
        self._options = options
        self._pool = ChunkPool(options.first_span, options.plan)
        self._faults: dict[PeerId, P2PTrainError | None] = {}
        self._tasks: dict[PeerId, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._rested: set[PeerId] = set()
        self._receiving: set[PeerId] = set()
        self._replace_at = asyncio.get_running_loop().time() + REPLACE_SECONDS
        self._before: Counter[PeerId] = Counter()
        self._bytes_from: Counter[PeerId] = Counter()
        if target.done:
            self._pool.fill(target.done)

    def report(self) -> FetchReport:
        faults = {source: fault for source, fault in self._faults.items() if fault is not None}
        return FetchReport(dict(self._bytes_from), faults)

    async def run(self) -> None:
        """Return when all is there; see `fetch` for what is raised."""
        async with Tasks() as tasks:
            while not self._target.is_complete and self._start_sources(tasks):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._changed.wait()
            for source in self._receiving:
                self._tasks[source].cancel()
            await tasks.close(CLOSE_SECONDS)
        if not self._target.is_complete:
            raise self._verdict()

    def _start_sources(self, tasks: Tasks) -> bool:
        """Ask further peers where there is room for them; return whether any is being asked."""
        found = [source for source in self._find_sources() if source != self._rpc.peer_id]
        fresh = [source for source in found if source not in self._tasks]
        running = [source for source, task in self._tasks.items() if not task.done()]
        if fresh and len(running) >= self._options.max_sources:
            self._rest_slowest(running)
        rested = [source for source in found if source in self._rested and self._tasks[source].done()]
        for source in [*fresh, *rested][: max(0, self._options.max_sources - len(running))]:
            self._rested.discard(source)
            self._faults[source] = None
            self._pool.join(source)
            self._tasks[source] = tasks.start(self._use(source), f"{self._name}-from-{source[-8:]}")
            running.append(source)
        return bool(running)

    def _rest_slowest(self, running: list[PeerId]) -> None:
        """Now and then, replace the source that sent least of late by one that was not asked yet."""
        now = asyncio.get_running_loop().time()
        if now < self._replace_at:
            return
        slowest = min(running, key=lambda source: self._bytes_from[source] - self._before[source])
        logger.info("%s: peer %s gives its place to another source", self._name, slowest[-8:])
        self._tasks[slowest].cancel()
        self._rested.add(slowest)
        running.remove(slowest)
        self._replace_at, self._before = now + REPLACE_SECONDS, Counter(self._bytes_from)

    def _verdict(self) -> P2PTrainError:
        """Return the most telling of the sources' faults, with all of them in its message."""
        faults = list(self.report().faults.values())
        if not faults:
            return PeerLostError("?", f"no other peer has the {self._name}: wait for one, or start from a checkpoint")
        text = f"no source of the {self._name} is left: " + "; ".join(map(str, faults))[:800]
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
        """Take chunks from one source until all is there or it is given up; then its fault says why."""
        attempts = 0
        try:
            while not self._target.is_complete:
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
                    raise  # It is not the source's fault.
                except (ProtocolError, IntegrityError, IncompatibleError) as error:
                    self._rpc.count_refusal(source, f"bad {self._name}")
                    logger.warning("%s: gave up peer %s: %s", self._name, source[-8:], error)
                    self._faults[source] = error
                    return
                except TemporaryError as error:
                    self._faults[source] = error
                finally:
                    if self._pool.give_back(source):
                        self._notify()
                attempts = 1 if self._bytes_from[source] > before else attempts + 1
                if attempts >= self._options.attempts:
                    logger.info("%s: gave up peer %s: %s", self._name, source[-8:], self._faults[source])
                    return
                random = self._rpc.runtime.random.random()
                await asyncio.sleep(FIRST_RETRY_SECONDS * 2**attempts * (1 + random))
        finally:
            self._pool.leave(source)
            # When this was the last source, the waiting main task has to see that it is done.
            asyncio.get_running_loop().call_soon(self._notify)

    async def _converse(self, source: PeerId, run: list[int]) -> None:
        target, asked = self._target, deque[list[int]]()
        request = Open(self._key, self._options.waits)
        async with self._rpc.open(
            source, service(self._name), request, self._options.open_seconds, expected_bytes=target.expected_bytes
        ) as channel:
            asking = not target.asks_at_once or await self._ask(channel, asked, run)
            self._bytes_from[source] += await target.agree(channel, self._options)
            self._faults[source] = None
            if not self._pool.is_filled:
                self._pool.fill(target.done)
                self._notify()
            if not target.asks_at_once:
                asking = await self._ask(channel, asked, run)
            await self._pull(channel, asked, asking)
            self._receiving.discard(source)

    async def _ask(self, channel: Channel, asked: deque[list[int]], run: list[int] | None = None) -> bool:
        """Ask ahead; False once the source was told that nothing more will be asked.

        Args:
            channel: To the source.
            asked: The runs that are due; grows.
            run: The first to ask for; taken from the pool already.
        """
        await self._target.wait_for_turn()
        while len(asked) < RUNS_ASKED_AHEAD:
            if not (run := run or self._pool.take(channel.remote)):
                await channel.send(Enough())
                return False
            await channel.send(Ask(run))
            asked.append(run)
            run = None
        return True

    async def _pull(self, channel: Channel, asked: deque[list[int]], asking: bool) -> None:
        """Receive into one buffer while others are verified."""
        loop, target = asyncio.get_running_loop(), self._target
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
                    await receive_steadily(channel, len(view), view, self._options.least)
                    checks.append(tasks.call(self._check(channel.remote, index, view), "check"))
                self._pool.adapt(channel.remote, loop.time() - started)
                if asking:
                    asking = await self._ask(channel, asked)
            for check in checks:
                await check

    async def _check(self, source: PeerId, index: int, received: memoryview) -> None:
        self._bytes_from[source] += await self._target.put(source, index, received)
        self._pool.settle(source, index)
        if self._target.is_complete:
            self._notify()
