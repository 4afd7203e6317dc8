"""A network of simulated peers in one process; each fault is one method call.

::

    async def main(network: SimulatedNetwork) -> None:
        alice, bob = network.add_peer("alice"), network.add_peer("bob")
        ...
        network.crash(bob)

    simulate(main, seed=7)

The seed determines every event; `SimulatedNetwork.trace` records them, for comparison between runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import hmac
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

import base58

from p2ptrain.network.simulated.directory import SimulatedDirectory, Store
from p2ptrain.network.simulated.links import DEAD_SECONDS, Link, LinkModel
from p2ptrain.network.simulated.loop import MAX_REAP_ROUNDS, SimulationError, VirtualTimeLoop, current_owner
from p2ptrain.network.simulated.streams import Pipe, SimulatedStream
from p2ptrain.network.simulated.transport import SimulatedTransport
from p2ptrain.network.transport import PeerId
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer
from p2ptrain.tasks import logger as failures

T = TypeVar("T")

EPOCH_SECONDS = 1.7e9
"""Wall-clock time at the start of every simulation."""


@dataclass(frozen=True)
class PeerOptions:
    """Properties of one peer's machine; a rate of 0 selects the default of the `LinkModel`."""

    up_bytes_per_second: float = 0.0
    down_bytes_per_second: float = 0.0
    skew_seconds: float = 0.0
    """Added to its wall clock."""
    latency_seconds: float = 0.0
    """Added to the one-way latency of all its streams."""


class SimulatedSigner(Signer):
    """Signs with a keyed hash; the signers of one network share their keys by peer id through ``keyring``.

    The network's seed and the name determine the identity.
    """

    def __init__(self, seed: int | str, name: str, keyring: dict[str, bytes]) -> None:
        self._key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        self.peer_id = base58.b58encode(b"\x12\x20" + hashlib.sha256(b"public" + self._key).digest()).decode()
        self._keyring = keyring
        keyring[self.peer_id] = self._key

    def sign(self, message: bytes) -> bytes:
        """Return a keyed hash of ``message``, 32 bytes."""
        return hashlib.blake2b(message, key=self._key, digest_size=32).digest()

    def verify(self, peer_id: str, message: bytes, proof: bytes) -> bool:
        """True if the peer of this network with that id signed ``message``."""
        key = self._keyring.get(peer_id)
        if key is None or not isinstance(proof, bytes):
            return False
        return hmac.compare_digest(hashlib.blake2b(message, key=key, digest_size=32).digest(), proof)

    def derive(self, purpose: bytes) -> bytes:
        return hashlib.blake2b(purpose, key=self._key, digest_size=32, person=b"derive").digest()


class SimulatedPeer:
    """One simulated process; created by `SimulatedNetwork.add_peer`, dead after `SimulatedNetwork.crash`.

    Its transport, directory, runtime and signer are the dependencies of a real peer's protocol code.
    """

    def __init__(self, network: SimulatedNetwork, name: str, incarnation: int, options: PeerOptions) -> None:
        model = network.model
        self.name = name
        self.incarnation = incarnation
        self.options = options
        self.alive = True
        self.signer = SimulatedSigner(network.seed, name, network.keyring)
        self.peer_id: PeerId = self.signer.peer_id
        self.address = f"/dns4/{name}.example/tcp/4001/p2p/{self.peer_id}"
        self.uplink = Link(network.loop, network.context, options.up_bytes_per_second or model.up_bytes_per_second)
        self.downlink = Link(
            network.loop, network.context, options.down_bytes_per_second or model.down_bytes_per_second
        )
        self.runtime = Runtime(
            random=random.Random(f"{network.seed}/{name}/{incarnation}"),
            clock=lambda: network.wall_time() + options.skew_seconds,
        )
        self.directory = SimulatedDirectory(network, self)
        self.transport = SimulatedTransport(network, self)
        self._network = network
        self._context = network.context.copy()
        self._context.run(current_owner.set, self)

    @property
    def is_running(self) -> bool:
        """True unless the peer has crashed or is stalled."""
        return self.alive and not self._network.loop.is_frozen(self)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``coroutine`` as a task of this peer; it and its child tasks stall and die with the peer."""
        return self._network.loop.create_task(coroutine, context=self._context.copy())

    async def close(self) -> None:
        """End streams and handlers in good order; spawned tasks are not ended."""
        await self.transport.close()
        await self.directory.close()

    def __repr__(self) -> str:
        return f"<peer {self.name}>"


class SimulatedNetwork:
    """Peers, the links between them, and their faults; created by `simulate`.

    Attributes:
        peers: The current incarnation of each peer by name, crashed ones included.
        trace: ``(time, event, details…)`` of all events.
    """

    def __init__(self, loop: VirtualTimeLoop, seed: int, model: LinkModel | None = None) -> None:
        self.loop = loop
        self.seed = seed
        self.model = model or LinkModel()
        self.random = random.Random(f"{seed}/network")
        self.context: Context = copy_context()
        self.context.run(current_owner.set, None)
        self.peers: dict[str, SimulatedPeer] = {}
        self.keyring: dict[str, bytes] = {}
        self.trace: list[tuple[object, ...]] = []
        self._by_id: dict[PeerId, SimulatedPeer] = {}
        self._latencies: dict[tuple[str, str], float] = {}
        self._streams: dict[int, tuple[SimulatedPeer, SimulatedStream, SimulatedPeer, SimulatedStream]] = {}
        self._num_streams = 0
        self._groups: dict[str, int] = {}
        self._cut: dict[str, None] = {}
        self._blocked: set[tuple[str, str]] = set()
        self._stores: dict[str, Store] = {"0": Store()}
        self._sides: dict[str, str] = {}
        self._disconnected: dict[int, asyncio.TimerHandle] = {}

    # Peers

    def add_peer(self, name: str, **options: float) -> SimulatedPeer:
        """Start a new peer; ``name`` and the seed determine its identity. Options as in `PeerOptions`."""
        if name in self.peers:
            raise ValueError(f"there is a peer {name!r} already: restart it instead")
        return self._start(name, 0, PeerOptions(**options))

    def _start(self, name: str, incarnation: int, options: PeerOptions) -> SimulatedPeer:
        peer = SimulatedPeer(self, name, incarnation, options)
        self.peers[name] = self._by_id[peer.peer_id] = peer
        self.record("start", name, incarnation)
        self._rewire()
        return peer

    def restart(self, peer: SimulatedPeer) -> SimulatedPeer:
        """Start a crashed ``peer`` again with the same identity; returns its new incarnation."""
        if self.peers[peer.name].alive:
            raise ValueError(f"{peer.name} is alive: crash it first")
        return self._start(peer.name, self.peers[peer.name].incarnation + 1, peer.options)

    @property
    def alive(self) -> list[SimulatedPeer]:
        """The peers that have not crashed, in order of addition."""
        return [peer for peer in self.peers.values() if peer.alive]

    # Faults

    def crash(self, peer: SimulatedPeer) -> None:
        """Like SIGKILL: cancel its tasks, end its streams, and refuse dials to it."""
        if not peer.alive:
            return
        self.record("crash", peer.name)
        peer.alive = False
        self.loop.thaw(peer)
        peer.transport.kill()
        self._reap(peer, 0)

    def _reap(self, peer: SimulatedPeer, rounds: int) -> None:
        """Cancel the peer's tasks repeatedly, so that none waits in its cleanup."""
        tasks = self.loop.pending_tasks(peer)
        if not tasks:
            self.loop.bury(peer)
        elif rounds == MAX_REAP_ROUNDS:
            raise SimulationError(f"tasks of {peer.name} outlive its crash; {self.loop.describe_tasks()}")
        else:
            current = asyncio.current_task()
            for task in tasks:
                if task is not current or rounds:
                    task.cancel()
            self.loop.call_soon(self._reap, peer, rounds + 1, context=self.context)

    def stall(self, peer: SimulatedPeer, seconds: float | None = None) -> None:
        """Like SIGSTOP: dials succeed and buffers fill, but none of its code runs until `resume`."""
        if not peer.alive:
            return
        self.record("stall", peer.name, seconds)
        self.loop.freeze(peer)
        if seconds is not None:
            self.loop.call_later(seconds, self.resume, peer, context=self.context)

    def resume(self, peer: SimulatedPeer) -> None:
        if peer.alive:
            self.record("resume", peer.name)
            self.loop.thaw(peer)

    def partition(self, *groups: Iterable[SimulatedPeer]) -> None:
        """Isolate groups of peers from each other; the remaining peers form one group."""
        self._groups = {peer.name: number for number, group in enumerate(groups, 1) for peer in group}
        self.record("partition", *sorted(self._groups.items()))
        self._rewire()

    def heal(self) -> None:
        """End the partition; cut cables stay cut."""
        self._groups = {}
        self.record("heal")
        self._rewire()

    def cut(self, peer: SimulatedPeer) -> None:
        """Pull the peer's cable: silence in both directions; streams end after `DEAD_SECONDS`."""
        self._cut[peer.name] = None
        self.record("cut", peer.name)
        self._rewire()

    def mend(self, peer: SimulatedPeer) -> None:
        self._cut.pop(peer.name, None)
        self.record("mend", peer.name)
        self._rewire()

    def block(self, caller: SimulatedPeer, target: SimulatedPeer) -> None:
        """Leave all later dials from one peer to another without an answer, as a NAT does."""
        self._blocked.add((caller.name, target.name))
        self.record("block", caller.name, target.name)

    def set_latency(self, first: SimulatedPeer, second: SimulatedPeer, seconds: float) -> None:
        self._latencies[first.name, second.name] = self._latencies[second.name, first.name] = seconds

    def _rewire(self) -> None:
        """Bring stores and streams in line with the current connectivity."""
        before, self._sides = self._sides, {}
        stores: dict[str, Store] = {}
        sources: set[tuple[str, str]] = set()
        for name in self.peers:
            side = f"cut {name}" if name in self._cut else str(self._groups.get(name, 0))
            self._sides[name] = side
            source = before.get(name, side)
            if side not in stores:
                stores[side] = self._stores[source].copy() if source in self._stores else Store()
            elif (side, source) not in sources and source in self._stores:
                stores[side].merge(self._stores[source])
            sources.add((side, source))
        self._stores = stores
        for number, (first, one, second, other) in list(self._streams.items()):
            if self.connected(first, second):
                timer = self._disconnected.pop(number, None)
                if timer is not None:
                    timer.cancel()
                    one.incoming.release_held()
                    other.incoming.release_held()
            elif number not in self._disconnected:
                timer = self.loop.call_later(DEAD_SECONDS, self._reset, number, context=self.context)
                self._disconnected[number] = timer

    def _reset(self, number: int) -> None:
        self._disconnected.pop(number, None)
        if number in self._streams:
            _, one, _, other = self._streams[number]
            one.reset()
            other.reset()

    # Called by streams, transports and directories

    def record(self, event: str, *details: object) -> None:
        self.trace.append((self.loop.time(), event, *details))

    def wall_time(self) -> float:
        """True wall-clock time in seconds since the epoch."""
        return EPOCH_SECONDS + self.loop.time()

    def connected(self, first: SimulatedPeer, second: SimulatedPeer) -> bool:
        return self._sides[first.name] == self._sides[second.name]

    def _answers(self, caller: SimulatedPeer, target: SimulatedPeer) -> bool:
        return self.connected(caller, target) and (caller.name, target.name) not in self._blocked

    def latency(self, first: SimulatedPeer, second: SimulatedPeer) -> float:
        key = (first.name, second.name)
        latency = self._latencies.get(key)
        if latency is None:
            low, high = sorted(key)
            latency = random.Random(f"{self.seed}/{low}/{high}").uniform(*self.model.latency_seconds)
            latency += sum(self.peers[name].options.latency_seconds for name in key)
            self._latencies[key] = self._latencies[high, low] = self._latencies[low, high] = latency
        return latency

    def isolated(self, peer: SimulatedPeer) -> bool:
        """True if other peers are alive, and this one can reach none of them."""
        others = [other for other in self.alive if other is not peer]
        return bool(others) and not any(self.connected(peer, other) for other in others)

    def store_of(self, peer: SimulatedPeer) -> Store:
        return self._stores[self._sides[peer.name]]

    def forget(self, stream: int, end: SimulatedPeer) -> None:
        entry = self._streams.get(stream)
        if entry is None:
            return
        first, one, second, other = entry
        (first if first is end else second).transport.detach(stream)
        if one.over and other.over:
            del self._streams[stream]
            timer = self._disconnected.pop(stream, None)
            if timer is not None:
                timer.cancel()

    def dial(
        self, caller: SimulatedPeer, peer_id: PeerId, protocol: str, answer: asyncio.Future[SimulatedStream | None]
    ) -> None:
        """Set ``answer`` after a round trip, to the caller's end of a new stream, or None for a refusal.

        The round trip is that of the `LinkModel`.
        """
        target = self._by_id.get(peer_id)
        self.record("dial", caller.name, target.name if target else "?", protocol)
        delay = self.latency(caller, target) if target is not None and target is not caller else 0.0
        if self.model.are_dials_free and target is not None and self.connected(caller, target):
            delay = 0.0

        def arrive() -> None:
            target = self._by_id.get(peer_id)  # Another incarnation may have taken its place.
            if not caller.alive or answer.done() or (target is not None and not self._answers(caller, target)):
                return  # No answer: the dial times out.
            stream: SimulatedStream | None = None
            if target is not None and target is not caller and target.alive and target.transport.serves(protocol):
                stream = self._connect(caller, target, protocol)
            self.loop.call_later(delay, reply, stream, context=self.context)

        def reply(stream: SimulatedStream | None) -> None:
            if not answer.done():
                answer.set_result(stream)
            elif stream is not None:
                stream.abort()

        self.loop.call_later(delay, arrive, context=self.context)

    def _connect(self, caller: SimulatedPeer, target: SimulatedPeer, protocol: str) -> SimulatedStream:
        number = self._num_streams = self._num_streams + 1
        there, back = Pipe(self, number, caller, target), Pipe(self, number, target, caller)
        stream, remote = SimulatedStream(there, back), SimulatedStream(back, there)
        self._streams[number] = (caller, stream, target, remote)
        caller.transport.attach(stream)
        self.record("open", caller.name, target.name, number)
        target.transport.accept(remote, protocol)
        return stream

    async def ping(self, caller: SimulatedPeer, peer_id: PeerId, timeout_seconds: float) -> bool:
        """True if a connection to the peer succeeds within the timeout."""
        target = self._by_id.get(peer_id)
        if target is None or not target.alive:
            return False
        round_trip = 2 * self.latency(caller, target) if target is not caller else 0.0
        await asyncio.sleep(min(round_trip, timeout_seconds))
        if not self.connected(caller, target):
            await asyncio.sleep(max(0.0, timeout_seconds - round_trip))
            return False
        return round_trip <= timeout_seconds and target.alive

    def leftovers(self) -> str:
        """Return the open streams of living peers, for an error message; empty if there are none."""
        lines = [
            f"stream {number} to {far.name} is open at {near.name}"
            for number, (first, one, second, other) in self._streams.items()
            for near, end, far in ((first, one, second), (second, other, first))
            if near.alive and not end.over
        ]
        return "\n  ".join(lines[:20])


def simulate(
    main: Callable[[SimulatedNetwork], Awaitable[T]],
    seed: int,
    *,
    model: LinkModel | None = None,
    max_seconds: float = 7 * 86400.0,
    max_callbacks: int = 100_000_000,
    settle_seconds: float = 1.0,
) -> T:
    """Run ``main(network)`` in virtual time and return its result; check that it leaves nothing behind.

    Args:
        main: Starts the peers, and ends everything that it started.
        settle_seconds: Grace period in virtual time after ``main``, for tasks and streams that are ending.

    Raises:
        SimulationDeadlock: All tasks wait forever.
        SimulationError: A limit was reached, an exception was lost, or tasks or streams were left behind.
    """
    loop = VirtualTimeLoop.create(max_seconds=max_seconds, max_callbacks=max_callbacks)
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 20, 20)  # The trace and thousands of tasks stay alive: frequent collection is useless.
    gc.freeze()  # Exclude all earlier objects, such as torch's, from collection.
    try:
        network = SimulatedNetwork(loop, seed, model)

        async def run() -> T:
            result = await main(network)
            await _settle(network, settle_seconds)
            return result

        with _watched(loop):
            return loop.run_until_complete(run())
    finally:
        _clean_up(loop)
        gc.unfreeze()
        gc.set_threshold(*thresholds)


@contextlib.contextmanager
def _watched(loop: VirtualTimeLoop) -> Iterator[None]:
    """Record a background task that died of a defect as a lost exception, even if its owner continues."""

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info:
                loop.errors.append({"message": record.getMessage(), "exception": record.exc_info[1]})

    handler = Watch(logging.ERROR)
    failures.addHandler(handler)
    try:
        yield
    finally:
        failures.removeHandler(handler)


async def _settle(network: SimulatedNetwork, settle_seconds: float) -> None:
    loop, current = network.loop, asyncio.current_task()
    deadline = loop.time() + settle_seconds
    while True:
        left = [task for task in loop.pending_tasks() if task is not current]
        streams = network.leftovers()
        if not left and not streams:
            break
        if loop.time() >= deadline:
            raise SimulationError(f"the simulation left something behind: {loop.describe_tasks()}\n  {streams}")
        await asyncio.sleep(settle_seconds / 20)
    if loop.errors:
        first = loop.errors[0]
        raise SimulationError(f"an exception was lost: {first.get('message')}") from first.get("exception")


def _clean_up(loop: VirtualTimeLoop) -> None:
    """Cancel the tasks of a failed simulation, so that the interpreter reports no pending tasks."""
    for peer in {task.owner: None for task in loop.pending_tasks()}:
        loop.thaw(peer)
    try:
        for _ in range(MAX_REAP_ROUNDS):
            tasks = loop.pending_tasks()
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
    except SimulationError:
        pass  # The first failure is reported.
    finally:
        loop.close()
