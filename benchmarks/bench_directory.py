"""What it costs a peer to know the others, and how old its knowledge is.

python -m benchmarks.bench_directory
python -m benchmarks.bench_directory --quick

Simulated peers run the product's presence and exchange in virtual time, with records and signatures of real size. They
share what they verified, to save time. Of a large swarm, 250 peers are live, and also carry the records that the others
write; each counts as met by those that hold it, as after ten minutes. A peer holds at most 1,024 records, so with more
its cost no longer depends on their number. Real peers have daemons of their own on loopback, and share one process.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

from benchmarks.findings import Finding, Section, run
from benchmarks.harness import arguments
from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.network.directory import Directory
from p2ptrain.network.factory import DirectoryOptions
from p2ptrain.network.records import book
from p2ptrain.network.records.record import (
    OpenedRecord,
    PeerRecord,
    RoundReport,
    open_record,
    seal_record,
)
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.simulated import SimulatedNetwork, simulate
from p2ptrain.network.simulated.network import SimulatedSigner
from p2ptrain.node.presence import LEAST_PAYLOAD_BYTES, Presence
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer
from tests.support.records import record_of
from tests.support.sim.presences import SWARM, PresentPeer

PROOF_BYTES = 552
"""Of an RSA key and its signature."""
REPLICAS = 5
"""DHT nodes that answer a look-up with a shard's sample."""
MOST_BYTES_PER_SECOND = 20_000.0
MOST_LIVE = 250
"""Live peers; in a larger swarm they carry the records of the others."""


@dataclass(frozen=True)
class Cost:
    """Of one peer. Bytes and requests are of a second; ages are of the records that it holds, in seconds.

    Attributes:
        held: Records of others.
        interval: Between two records of one peer, in seconds.
        delay: From a record's writing until a peer holds it, median and 99th percentile, in seconds.
    """

    held: float
    interval: float
    received: float
    sent: float
    directory: float
    exchanges: float
    directory_requests: float
    delay: tuple[float, float]


class LongSigner(Signer):
    """A simulated signer with signatures as long as real ones."""

    def __init__(self, signer: Signer) -> None:
        self.peer_id = signer.peer_id
        self._signer = signer

    def sign(self, message: bytes) -> bytes:
        proof = self._signer.sign(message)
        return proof + bytes(PROOF_BYTES - len(proof))

    def verify(self, peer_id: str, message: bytes, proof: bytes) -> bool:
        return self._signer.verify(peer_id, message, proof[:32])

    def derive(self, purpose: bytes) -> bytes:
        return self._signer.derive(purpose)


def trainer(peer: str) -> PeerRecord:
    """What a trainer says that has been there for a while."""
    report = RoundReport(60_000, True, "", 31.5123, 64, 64, True, b"e" * 32, 24.123, 1.25, 1.2512)
    addresses = tuple(f"/ip4/203.0.113.{number}/tcp/31337/p2p/{peer}" for number in (1, 2))
    values = {
        "round": 60_001,
        "lineage_tokens": 1 << 40,
        "loss": 2.5,
        "tokens_per_second": 1234.5,
        "last_rounds": (report,) * 8,
    }
    return record_of(peer, addresses=addresses, **values)


class Swarm:
    """Live peers, and the records that they carry for others."""

    def __init__(self, network: SimulatedNetwork, num_peers: int) -> None:
        self.network = network
        self.num_peers = num_peers
        num_live = min(num_peers, MOST_LIVE)
        self.delays: list[float] = []
        self._is_measuring = False
        self.peers = [
            PresentPeer(network, f"p{number}", trainer, lambda peer: LongSigner(peer.signer))
            for number in range(num_live)
        ]
        self._others = [
            LongSigner(SimulatedSigner(network.seed, f"other {number}", network.keyring))
            for number in range(num_peers - num_live)
        ]
        self._payload = replace(trainer("x"), peer="x").to_payload(LEAST_PAYLOAD_BYTES)
        for each in self.peers:
            self._watch(each)

    def _watch(self, peer: PresentPeer) -> None:
        update = peer.membership.update

        def measured(record: PeerRecord, sequence: int, expires_at: float) -> None:
            if self._is_measuring:
                self.delays.append(peer.peer.runtime.now() - sequence / 1000)
            update(record, sequence, expires_at)
            if self._others:
                peer.presence.book.meet(record.peer)

        def partners(count: int) -> list[str]:
            """Choose among those that answer, since carried ones do not."""
            others = [each.id for each in self.peers if each is not peer]
            return peer.peer.runtime.random.sample(others, count)

        peer.membership.update = measured  # type: ignore[method-assign]
        if self._others:
            peer.presence.exchange.partners = partners  # type: ignore[method-assign]

    async def _carry(self) -> None:
        """Write the records of those that are not live, each as often as a live peer does."""
        while True:
            began = asyncio.get_running_loop().time()
            for number, other in enumerate(self._others):
                carrier = self.peers[number % len(self.peers)]
                now, pause = carrier.peer.runtime.now(), carrier.presence._pause
                sealed = seal_record(SWARM, self._payload, int(now * 1000), now + 540.0, other)
                carrier.presence.book.take(sealed)
                carrier.presence.book.meet(other.peer_id)
                await asyncio.sleep(
                    max(0.0, began + pause * number / len(self._others) - asyncio.get_running_loop().time())
                )

    async def cost(self, seconds: float) -> Cost:
        for each in self.peers:
            await each.rpc.start()
        self._start_all()
        tasks = [self.network.loop.create_task(self._carry())] if self._others else []
        await self._wait(60.0)
        await self._wait(max(each.presence._pause for each in self.peers))
        before, self._is_measuring = self._counts(), True
        directory = await self._wait(seconds)
        self._is_measuring, after = False, self._counts()
        received, sent, exchanges = (
            (now - then) / seconds / len(self.peers) for now, then in zip(after, before, strict=True)
        )
        for task in tasks:
            task.cancel()
        delays = statistics.quantiles(self.delays, n=100)
        cost = Cost(
            statistics.fmean(len(each.presence.book) - 1 for each in self.peers),
            statistics.fmean(each.presence._pause for each in self.peers),
            received, sent,
            directory[1] * REPLICAS * 1600 / seconds / len(self.peers),
            exchanges, directory[0] / seconds / len(self.peers),
            (delays[49], delays[98]),
        )  # fmt: skip
        for each in self.peers:
            await each.close()
        return cost

    def _start_all(self) -> None:
        for each in self.peers:
            each.peer.spawn(each.presence.start())

    async def _wait(self, seconds: float) -> tuple[int, int]:
        """Wait; return how many requests the directory got, and how many records it answered with."""
        requests = records = 0
        for _ in range(round(seconds)):
            self.network.trace.clear()
            await asyncio.sleep(1.0)
            found = [event for event in self.network.trace if event[1] in ("look up", "publish")]
            requests += len(found)
            records += sum(int(str(event[4])) for event in found if event[1] == "look up")
        return requests, records

    def _counts(self) -> tuple[int, int, int]:
        traffic = [each.rpc.traffic for each in self.peers]
        done = sum(each.presence.exchange._num_done for each in self.peers)
        return sum(each.received for each in traffic), sum(each.sent for each in traffic), done


@contextlib.contextmanager
def shared_verification() -> Iterator[None]:
    """Let the peers of this process share what they verified, during the block."""
    found: dict[bytes, tuple[OpenedRecord, PeerRecord]] = {}
    from_payload = PeerRecord.from_payload

    def opened(value: bytes, swarm: bytes, verifier: Signer) -> OpenedRecord:
        if value not in found:
            record = open_record(value, swarm, verifier)
            found[value] = record, from_payload(record.peer, record.payload)
            parsed[id(record.payload)] = found[value][1]
        return found[value][0]

    parsed: dict[int, PeerRecord] = {}
    parse = mock.patch.object(PeerRecord, "from_payload", lambda peer, payload: parsed[id(payload)])
    with mock.patch.object(book, "open_record", opened), parse:
        yield


def simulated(sizes: Sequence[int], seconds: float) -> Section:
    """Swarms of these sizes."""
    section = Section(
        f"Knowing the others, simulated, {seconds:g} s",
        ("peers", "held", "new record every (s)", "read (kB/s)", "sent (kB/s)", "exchanges a s", "directory requests",
         "of that read (kB/s)", "delay (s)", "99th percentile"),
    )  # fmt: skip
    for size in sizes:

        async def main(network: SimulatedNetwork, size: int = size) -> Cost:
            return await Swarm(network, size).cost(seconds)

        with shared_verification():
            cost = simulate(main, seed=size)
        read = cost.received + cost.directory
        section.rows.append((
            size, f"{cost.held:.0f}", f"{cost.interval:.0f}", f"{read / 1e3:.1f}", f"{cost.sent / 1e3:.1f}",
            f"{cost.exchanges:.2f}", f"{cost.directory_requests:.3f}", f"{cost.directory / 1e3:.2f}",
            f"{cost.delay[0]:.1f}", f"{cost.delay[1]:.1f}",
        ))  # fmt: skip
        section.results[str(size)] = cost.__dict__
        goal = 1.0 if size >= 1000 else None
        section.findings.append(Finding(f"{size} peers: read", read / MOST_BYTES_PER_SECOND, "20 kB/s", goal))
    return section


def real(count: int, seconds: float) -> Section:
    """Peers with daemons of their own on loopback, in this process."""
    values = asyncio.run(_real(count, seconds))
    section = Section(
        f"Knowing the others, {count} daemons on loopback, {seconds:g} s",
        ("peers", "held", "exchange: read (kB/s)", "exchanges a s", "DHT: read (kB/s)", "DHT requests a s", "age (s)"),
        [(count, *(f"{value:.2f}" for value in values.values()))],
        results=values,
    )
    read = 1e3 * (values["exchange"] + values["dht"])
    section.findings.append(Finding(f"{count} daemons: read", read / MOST_BYTES_PER_SECOND, "20 kB/s"))
    return section


def _same(directory: Directory) -> Directory:
    return directory


async def _real(count: int, seconds: float) -> dict[str, float]:
    from hivemind.p2p import P2P

    from p2ptrain.network.libp2p.directory import Libp2pDirectory
    from tests.support.processes.daemons import loopback_transport

    dht = [0, 0]
    call = P2P.call_protobuf_handler

    async def counted(self: Any, peer: Any, name: str, request: Any, kind: Any) -> Any:
        reply = await call(self, peer, name, request, kind)
        dht[0] += reply.ByteSize()
        dht[1] += 1
        return reply

    P2P.call_protobuf_handler = counted
    peers: list[tuple[Rpc, Presence]] = []
    async with contextlib.AsyncExitStack() as stack:
        bootstrap: tuple[str, ...] = ()
        for number in range(count):
            identity, transport = await stack.enter_async_context(loopback_transport(bootstrap=bootstrap))
            bootstrap = bootstrap or tuple(await transport.addresses())
            runtime = Runtime(random.Random(number))
            rpc = Rpc(transport, runtime, SWARM)
            options = DirectoryOptions("libp2p", transport, SWARM, identity, runtime, bootstrap if number else ())
            directory = await Libp2pDirectory.start(options)
            membership = Membership(identity.peer_id, runtime)
            presence = Presence(
                partial(_same, directory), rpc, identity, membership, partial(trainer, identity.peer_id)
            )
            await rpc.start()
            await presence.start()
            stack.push_async_callback(directory.close)
            stack.push_async_callback(rpc.close)
            stack.push_async_callback(presence.close, False)
            peers.append((rpc, presence))
        await asyncio.sleep(30.0)
        before = sum(rpc.traffic.received for rpc, _ in peers)
        done, dht[:] = sum(each.exchange._num_done for _, each in peers), [0, 0]
        await asyncio.sleep(seconds)
        now = runtime.now()
        ages = [now - held.sequence / 1000 for _, each in peers for held in each.book.held()]
        share = seconds * count
        return {
            "held": statistics.fmean(len(each.book) - 1 for _, each in peers),
            "exchange": (sum(rpc.traffic.received for rpc, _ in peers) - before) / share / 1e3,
            "exchanges": (sum(each.exchange._num_done for _, each in peers) - done) / share,
            "dht": dht[0] / share / 1e3,
            "dht_requests": dht[1] / share,
            "age": statistics.median(ages),
        }


def main() -> int:
    """Measure and report."""
    parser = arguments(__doc__, "100 simulated peers, 4 daemons")
    parser.add_argument("--sizes", type=int, nargs="+", help="simulated peers")
    options = parser.parse_args()
    sizes = options.sizes or ([100] if options.quick else [100, 1000, 10_000])
    count, seconds = (4, 10.0) if options.quick else (24, 60.0)
    return run(
        "directory",
        {
            "simulated": partial(simulated, sizes, 20.0 if options.quick else 60.0),
            "real": partial(real, count, seconds),
        },
        options,
    )


if __name__ == "__main__":
    sys.exit(main())
