"""The DHT directory with real daemons on loopback: who sees whom, and which records are refused."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from hivemind.dht.node import DHTID
from hivemind.p2p import PeerID

from p2ptrain.network.factory import DirectoryOptions
from p2ptrain.network.identity import Identity
from p2ptrain.network.libp2p.dht_node import node_id_of
from p2ptrain.network.libp2p.directory import Libp2pDirectory
from p2ptrain.network.libp2p.transport import Libp2pTransport
from p2ptrain.network.records.record import (
    MAX_LIFETIME_SECONDS,
    MAX_RECORD_BYTES,
    NUM_SHARDS,
    open_record,
    peers_key,
    seal_record,
    shard_of,
)
from p2ptrain.runtime import Runtime
from tests.support.coroutines import on_loop
from tests.support.processes.daemons import eventually, free_port, is_stopped, loopback_transport, peer_process
from tests.support.signers import NamedSigner

SWARM, OTHER_SWARM = b"s" * 32, b"o" * 32

BOOTSTRAP = """
import asyncio, json
from tests.swarm.test_libp2p_directory import peer

async def main():
    async with peer() as this:
        assert await this.announce()
        print(json.dumps({"peer": this.identity.peer_id, "addresses": await this.transport.addresses()}), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


class Peer:
    def __init__(self, identity: Identity, transport: Libp2pTransport, directory: Libp2pDirectory) -> None:
        self.identity, self.transport, self.directory = identity, transport, directory

    def record(self, sequence: int = 1, expires_at: float | None = None, swarm: bytes = SWARM) -> tuple[bytes, float]:
        expires_at = time.time() + 60 if expires_at is None else expires_at
        return seal_record(swarm, {"sequence": sequence}, sequence, expires_at, self.identity), expires_at

    async def announce(self, sequence: int = 1) -> bool:
        value, expires_at = self.record(sequence)
        return await self.directory.publish(self.key, self.identity.peer_id, value, expires_at, 10)

    def keep_nothing(self) -> None:
        """Say of each record that it is kept, and do not keep it."""
        self.directory._node.protocol.storage.store = lambda *_, **__: True

    @property
    def key(self) -> str:
        return peers_key(SWARM, shard_of(self.identity.peer_id))

    async def seen(self) -> set[str] | None:
        """Whom it finds in all shards."""
        keys = (peers_key(SWARM, shard) for shard in range(NUM_SHARDS))
        found = await asyncio.gather(*(self.directory.look_up(key, 10) for key in keys))
        return {peer for each in found for peer in each or {}} if any(each is not None for each in found) else None


@contextlib.asynccontextmanager
async def peer(
    bootstrap: tuple[str, ...] = (),
    client_mode: bool = False,
    port: int = 0,
    key: Path | None = None,
    runtime: Runtime | None = None,
) -> AsyncIterator[Peer]:
    """Start a peer; its directory is closed twice."""
    listen = (f"/ip4/127.0.0.1/tcp/{port}",)
    async with loopback_transport(key, listen=listen, bootstrap=bootstrap) as (identity, transport):
        runtime = runtime or Runtime(random.Random(1))
        started = await Libp2pDirectory.start(
            DirectoryOptions("libp2p", transport, SWARM, identity, runtime, bootstrap, client_mode)
        )
        try:
            yield Peer(identity, transport, started)
        finally:
            await started.close()
            await started.close()


def address_of(key: Path, port: int) -> str:
    """Where the peer with this key will be, before it starts."""
    with Identity.create_or_load(key) as identity:
        return f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer_id}"


@pytest.mark.fault(26)
@on_loop
async def test_six_peers_started_together_form_one_directory(tmp_path: Path) -> None:
    """The bootstrap peer starts at the same moment as those who ask for it."""
    port, key, peers, done = free_port(), tmp_path / "bootstrap.key", list[Peer](), asyncio.Event()
    bootstrap = (address_of(key, port),)

    async def take_part(starting: AbstractAsyncContextManager[Peer]) -> None:
        async with starting as this:
            peers.append(this)
            await done.wait()

    async def check() -> None:
        await eventually(lambda: asyncio.sleep(0, len(peers) == 6))
        assert all(await asyncio.gather(*(this.announce() for this in peers)))
        everybody = {this.identity.peer_id for this in peers}

        async def all_see_all() -> bool:
            await asyncio.gather(*(this.announce(2) for this in peers))
            return all([await this.seen() == everybody for this in peers])

        await eventually(all_see_all)
        done.set()

    async with asyncio.TaskGroup() as group:
        for starting in (*(peer(bootstrap) for _ in range(5)), peer(port=port, key=key)):
            group.create_task(take_part(starting))
        group.create_task(check())


@pytest.mark.fault(13)
@on_loop
async def test_peers_find_each_other_after_their_bootstrap_died() -> None:
    async with peer() as first:
        bootstrap = tuple(await first.transport.addresses())
        async with peer(bootstrap) as a, peer(bootstrap) as b:
            await eventually(lambda: asyncio.sleep(0, b.directory.num_neighbours >= 2))
            await eventually(lambda: asyncio.sleep(0, a.directory.num_neighbours >= 2))
            os.kill(first.transport.daemon.process_id, signal.SIGKILL)

            async def both_see_both() -> bool:
                await asyncio.gather(a.announce(), b.announce())
                both = {a.identity.peer_id, b.identity.peer_id}
                return all([(await this.seen() or set()) >= both for this in (a, b)])

            await eventually(both_see_both)


@on_loop
async def test_without_a_bootstrap_peer_nobody_can_be_asked_until_it_comes_up(tmp_path: Path) -> None:
    port, key = free_port(), tmp_path / "late.key"
    async with peer((address_of(key, port),)) as early:
        assert await early.seen() is None
        assert [early.directory.clock_skew_seconds] == [None]
        async with peer(port=port, key=key) as late:
            await eventually(lambda: asyncio.sleep(0, early.directory.num_neighbours == 1))
            assert await early.announce()
            assert await late.seen() == {early.identity.peer_id}
            skew = early.directory.clock_skew_seconds
            assert skew is not None
            assert abs(skew) < 5


@on_loop
async def test_newer_records_replace_older_ones_and_expired_ones_vanish() -> None:
    async with peer() as a, peer(tuple(await a.transport.addresses())) as b:
        value, expires_at = b.record(1, time.time() + 8)
        assert await b.directory.publish(b.key, b.identity.peer_id, value, expires_at, 10)
        newer, later = b.record(2, time.time() + 8.5)
        assert await b.directory.publish(b.key, b.identity.peer_id, newer, later, 10)
        found = await a.directory.look_up(b.key, 10)
        assert found is not None
        entry = found[b.identity.peer_id]
        assert open_record(entry.value, SWARM, a.identity).sequence == 2
        assert entry.expires_at == later

        async def gone() -> bool:
            return await a.seen() == set() and await b.seen() == set()

        await eventually(gone)


@on_loop
async def test_a_client_sees_and_publishes_but_is_not_asked() -> None:
    async with peer() as a:
        assert await a.announce()
        async with peer(tuple(await a.transport.addresses()), client_mode=True) as client:
            assert await client.seen() == {a.identity.peer_id}
            assert await client.announce()
            assert await a.seen() == {a.identity.peer_id, client.identity.peer_id}
            assert a.directory.num_neighbours == 0


@pytest.mark.fault(35)
@on_loop
async def test_forged_foreign_oversized_and_long_lived_records_are_refused() -> None:
    async with peer() as a, peer(tuple(await a.transport.addresses())) as liar:
        assert await a.announce()
        liar.directory._node.protocol.record_validator = None  # a liar does not check itself
        victim, own = a.identity.peer_id, liar.identity.peer_id
        value, expires_at = liar.record()
        foreign, _ = liar.record(swarm=OTHER_SWARM, expires_at=expires_at)
        too_long, far = liar.record(expires_at=time.time() + MAX_LIFETIME_SECONDS + 60)
        attempts = {
            "in another's name": (victim, value, expires_at),
            "of another swarm": (own, foreign, expires_at),
            "for too long": (own, too_long, far),
            "longer than signed": (own, value, expires_at + 1),
            "garbage": (own, b"\x00garbage", expires_at),
            "too large": (own, bytes(4200), expires_at),
        }
        keys = {"under a key of nobody": "anything", "in another's name": a.key}
        attempts["under a key of nobody"] = own, value, expires_at
        node = liar.directory._node
        target = node.protocol.routing_table.uid_to_peer_id
        (storing_node,) = target.values()
        for what, (subkey, data, until) in attempts.items():
            refused_before = a.directory.guard.refused
            stored = await node.protocol.call_store(
                storing_node,
                [DHTID.generate(keys.get(what, liar.key))],
                [node.protocol.serializer.dumps(data)],
                [until],
                [subkey],
            )
            assert stored == [False], what
            assert a.directory.guard.refused == refused_before + 1, what
        assert await a.seen() == {victim}
        honest = await liar.directory.publish(liar.key, own, value, expires_at, 10)
        assert honest
        assert await a.seen() == {victim, own}


class AnyoneSigner(NamedSigner):
    """Verifies identities, and strangers that need no keys."""

    def __init__(self, identity: Identity) -> None:
        super().__init__(identity.peer_id)
        self._identity = identity

    def verify(self, peer_id: str, message: bytes, proof: bytes) -> bool:
        return super().verify(peer_id, message, proof) or self._identity.verify(peer_id, message, proof)


@pytest.mark.fault(45)
@on_loop
async def test_peers_find_each_other_beside_1250_records_of_the_largest_size() -> None:
    async with peer() as a:
        known = tuple(await a.transport.addresses())
        async with peer(known) as b, peer(known) as liar:
            for each in (a, b):
                each.directory.guard._guard._verifier = AnyoneSigner(each.identity)
            liar.directory._node.protocol.record_validator = None
            assert await a.announce()
            protocol, expires_at = liar.directory._node.protocol, time.time() + 300
            nodes = [PeerID.from_base58(each.identity.peer_id) for each in (a, b)]
            size = MAX_RECORD_BYTES - len(seal_record(SWARM, {"x": ""}, 1, 1.0, NamedSigner("stranger 0000"))) - 8
            for number in range(1250):
                name = f"stranger {number}"
                sealed = seal_record(SWARM, {"x": "x" * size}, 1, expires_at, NamedSigner(name))
                key, value = DHTID.generate(peers_key(SWARM, shard_of(name))), protocol.serializer.dumps(sealed)
                await protocol.call_store(nodes[number % 2], [key], [value], [expires_at], [name])
            assert await b.announce()
            both = {a.identity.peer_id, b.identity.peer_id}
            async with peer(known) as newcomer:
                for each in (a, b, newcomer):
                    assert (await each.seen() or set()) >= both
            for each in (a, b):
                storage = each.directory._node.protocol.storage
                held = [storage.get(DHTID.generate(peers_key(SWARM, shard))) for shard in range(NUM_SHARDS)]
                assert sum(len(found.value.packb()) for found in held if found is not None) < 1 << 20


@pytest.mark.fault(46)
@on_loop
async def test_six_nodes_with_chosen_ids_around_a_key_hide_nobody() -> None:
    async with contextlib.AsyncExitStack() as stack:
        seed = await stack.enter_async_context(peer())
        known = tuple(await seed.transport.addresses())
        a = await stack.enter_async_context(peer(known))
        for number in range(6):
            liar = await stack.enter_async_context(peer(known))
            node, protocol = liar.directory._node, liar.directory._node.protocol
            node.node_id = protocol.node_id = DHTID(DHTID.generate(a.key) ^ (number + 1))
            protocol.node_info.node_id = node.node_id.to_bytes()
            liar.keep_nothing()
            await liar.directory._join()
        assert await a.announce()
        found = await seed.directory.look_up(a.key, 10)
        assert set(found or ()) == {a.identity.peer_id}
        async with peer(known) as newcomer:
            assert a.identity.peer_id in (await newcomer.seen() or set())


@pytest.mark.fault(46)
@on_loop
async def test_nobody_is_hidden_by_the_nodes_nearest_to_its_key(tmp_path: Path) -> None:
    """All nodes that a peer hands its record to are nearer to the key than itself, and keep nothing."""

    def distance(node: str, of: str) -> int:
        key = DHTID.generate(peers_key(SWARM, shard_of(of)))
        return int(key.xor_distance(node_id_of(PeerID.from_base58(node))))

    names = {}
    for number in range(16):
        with Identity.create_or_load(tmp_path / f"{number}.key") as identity:
            names[identity.peer_id] = tmp_path / f"{number}.key"
    hidden = max(names, key=lambda name: distance(name, name))
    nearer = [name for name in names if distance(name, hidden) < distance(hidden, hidden)]
    async with contextlib.AsyncExitStack() as stack:
        seed = await stack.enter_async_context(peer())
        known = tuple(await seed.transport.addresses())
        a = await stack.enter_async_context(peer(known, key=names[hidden]))
        assert len(nearer) >= a.directory._node.num_replicas
        seed.keep_nothing()
        for name in nearer[: a.directory._node.num_replicas]:
            (await stack.enter_async_context(peer(known, key=names[name]))).keep_nothing()
        await a.directory._join()
        assert await a.announce()
        assert set(await seed.directory.look_up(a.key, 10) or ()) == {hidden}


@pytest.mark.fault(35)
@on_loop
async def test_a_reader_does_not_believe_a_lying_storer() -> None:
    async with peer() as liar, peer(tuple(await liar.transport.addresses())) as a:
        node = liar.directory._node
        value, expires_at = liar.record()
        assert node.protocol.storage.store(
            DHTID.generate(a.key), node.protocol.serializer.dumps(value), expires_at, a.identity.peer_id
        )
        assert await a.seen() == set()
        assert a.directory.guard.refused == 1


@on_loop
async def test_operations_end_by_their_deadline_when_the_daemon_hangs() -> None:
    async with peer() as a, peer(tuple(await a.transport.addresses())) as b:
        await eventually(lambda: asyncio.sleep(0, b.directory.num_neighbours == 1))
        os.kill(b.transport.daemon.process_id, signal.SIGSTOP)
        await eventually(lambda: asyncio.sleep(0, is_stopped(b.transport.daemon.process_id)))
        try:
            async with asyncio.timeout(30):
                value, expires_at = b.record()
                assert not await b.directory.publish(b.key, b.identity.peer_id, value, expires_at, 0.3)
                assert await b.directory.look_up(b.key, 0.3) is None
        finally:
            os.kill(b.transport.daemon.process_id, signal.SIGCONT)

        async def works_again() -> bool:
            return await b.announce() and await b.seen() == {b.identity.peer_id}

        await eventually(works_again)


@pytest.mark.fault(38)
@on_loop
async def test_a_clock_off_by_an_hour_is_measured_and_can_be_corrected() -> None:
    with peer_process(BOOTSTRAP) as (_, told):
        runtime = Runtime(random.Random(1), clock=lambda: time.time() + 3600)
        async with peer(tuple(told["addresses"]), runtime=runtime) as this:
            skew = this.directory.clock_skew_seconds
            assert skew is not None
            assert abs(skew - 3600) < 5
            assert await this.seen() == set()  # everybody's records look expired
            runtime.clock_offset_seconds = -skew
            assert await this.seen() == {told["peer"]}
            value, expires_at = this.record(expires_at=runtime.now() + 60)
            assert await this.directory.publish(this.key, this.identity.peer_id, value, expires_at, 10)
            assert await this.seen() == {told["peer"], this.identity.peer_id}
