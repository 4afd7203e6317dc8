"""`Directory` on a DHT: hivemind's ``DHTNode`` on the transport's daemon.

Every value is a sealed record under (key, peer id). Nodes validate records when they store and when they read them;
`p2ptrain.network.libp2p.dht_node` has their bounds.

Simultaneous starts (hivemind issue 624) and partitions can leave several DHTs. So a background task keeps pinging
bootstrap and remembered peers, more often while the routing table is empty. The pings also measure clock skew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import statistics
from typing import Any

from hivemind.dht import node as hivemind_node
from hivemind.dht import protocol as hivemind_protocol
from hivemind.dht.node import DHTID, DHTNode
from hivemind.p2p import P2P, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import timed_storage
from hivemind.utils.multiaddr import Multiaddr

from p2ptrain.buffers import Bounded
from p2ptrain.errors import ConfigError, PeerError, ResourceError
from p2ptrain.network.directory import MAX_SUBKEYS, Directory, Entry
from p2ptrain.network.factory import DirectoryOptions
from p2ptrain.network.libp2p.dht_node import DHTRecordGuard, ShardStorage, SwarmProtocol, node_id_of
from p2ptrain.network.libp2p.transport import Libp2pTransport
from p2ptrain.network.link import check_peer_address
from p2ptrain.network.records.record import RecordGuard
from p2ptrain.tasks import Tasks, together

logger = logging.getLogger(__name__)

RPC_SECONDS = 3.0
JOIN_SECONDS = 5.0
REJOIN_SECONDS = 0.5
REFRESH_SECONDS = 15.0
MAX_REMEMBERED_PEERS = 64
MAX_FOUND = 8 * MAX_SUBKEYS
"""Records of a look-up, which several nodes answer: none of them chooses which of the others' records are left."""


class Libp2pDirectory(Directory):
    """Publishes and looks up records in the swarm's DHT. Create one with `start`."""

    def __init__(self, options: DirectoryOptions, p2p: Any, node: Any, guard: DHTRecordGuard) -> None:
        assert isinstance(options.transport, Libp2pTransport)
        self.guard = guard
        self._transport = options.transport
        self._p2p = p2p
        self._node = node
        self._bootstrap: dict[str, list[str]] = {}
        for address in options.bootstrap:
            self._bootstrap.setdefault(check_peer_address(address), []).append(address)
        self._bootstrap.pop(self._transport.peer_id, None)
        self._remembered = Bounded[str, None](MAX_REMEMBERED_PEERS)
        self._runtime = options.runtime
        self._skews = Bounded[str, float](MAX_REMEMBERED_PEERS)
        self._tasks = Tasks()
        self._is_closed = False

    @classmethod
    async def start(cls, options: DirectoryOptions) -> Libp2pDirectory:
        """Start a DHT node; attempt to join once, and retry in the background.

        Raises:
            ConfigError: The transport is not `Libp2pTransport`.
            ResourceError: The transport's daemon fails.
        """
        transport, runtime = options.transport, options.runtime
        if not isinstance(transport, Libp2pTransport):
            raise ConfigError("the DHT needs the libp2p transport: set network.directory to one of another kind")
        # hivemind gets the time from a module-level function. Replace it by the runtime's corrected clock, so that a
        # machine with a wrong clock neither drops valid records nor publishes expired ones. One process is one peer.
        for module in (timed_storage, hivemind_node, hivemind_protocol):
            module.get_dht_time = runtime.now
        hivemind_node.DHTProtocol = SwarmProtocol  # what its nodes create
        guard = DHTRecordGuard(RecordGuard(options.swarm, options.verifier, runtime.now), options.swarm)
        p2p: Any = None
        try:
            async with asyncio.timeout(JOIN_SECONDS):
                p2p = await _attach(transport)
                node = await DHTNode.create(
                    p2p=p2p,
                    node_id=node_id_of(p2p.peer_id),
                    client_mode=options.client_mode,
                    record_validator=guard,
                    wait_timeout=RPC_SECONDS,
                    # A cached set of records would hide newer peers.
                    cache_locally=False,
                    cache_nearest=0,
                    cache_on_store=False,
                    cache_refresh_before_expiry=0,
                    reuse_get_requests=False,
                    # Constant backoff: hivemind's exponential backoff would outlast a peer's pause.
                    blacklist_time=2 * RPC_SECONDS,
                    backoff_rate=1.0,
                )
        except Exception as error:  # hivemind raises many kinds; here all concern the daemon
            if p2p is not None:
                await p2p.shutdown()
            raise ResourceError(f"the network daemon does not take the directory ({error!r}): try again") from error
        node.protocol.storage = ShardStorage(guard.keys, runtime.now)
        directory = cls(options, p2p, node, guard)
        if directory._bootstrap:
            await directory._join()
        directory._tasks.keep(directory._keep_joined, "directory-keeper")
        return directory

    @property
    def num_neighbours(self) -> int:
        """The number of peers in the routing table."""
        return len(self._node.protocol.routing_table.uid_to_peer_id)

    @property
    def clock_skew_seconds(self) -> float | None:
        """Median skew against other peers' clocks; its error is about half a round trip.

        None before the first answer, and without bootstrap peers: the first peer's clock is the swarm's.
        """
        return statistics.median(self._skews.values()) if self._skews and self._bootstrap else None

    async def publish(self, key: str, subkey: str, value: bytes, expires_at: float, timeout_seconds: float) -> bool:
        try:
            async with asyncio.timeout(timeout_seconds):
                stored = await self._node.store(
                    key, value, float(expires_at), subkey=subkey, exclude_self=self._node.protocol.client_mode
                )
        except Exception as error:  # hivemind raises many kinds; the caller publishes again anyway
            logger.debug("publishing %s failed: %r", key, error)
            return False
        if stored:  # This node keeps its own record, too: those nearest to the key may all lie, and keep nothing.
            protocol = self._node.protocol
            protocol.storage.store(DHTID.generate(key), protocol.serializer.dumps(value), float(expires_at), subkey)
        return bool(stored)

    async def look_up(self, key: str, timeout_seconds: float) -> dict[str, Entry] | None:
        try:
            async with asyncio.timeout(timeout_seconds):
                found = await self._node.get(key, latest=True)
        except Exception as error:  # hivemind raises many kinds; no peer could be asked
            logger.debug("looking up %s failed: %r", key, error)
            return None
        if self._bootstrap and not self.num_neighbours:
            return None
        if found is None or not isinstance(found.value, dict):
            return {}
        entries = {
            subkey: Entry(item.value, item.expiration_time)
            for subkey, item in found.value.items()
            if isinstance(subkey, str) and isinstance(item.value, bytes)
        }
        return dict(list(entries.items())[:MAX_FOUND])

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        await self._tasks.close()
        await self._node.protocol.tasks.close()
        with contextlib.suppress(Exception):  # the daemon may be gone
            async with asyncio.timeout(1):
                await self._node.shutdown()
        await self._p2p.shutdown()
        await asyncio.sleep(0)

    async def _keep_joined(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS if self.num_neighbours else REJOIN_SECONDS)
            for peer in self._node.protocol.routing_table.peer_id_to_uid:
                self._remembered[peer.to_base58()] = None
            try:
                await self._join()
            except Exception as error:  # the loop retries
                logger.debug("joining failed: %r", error)

    async def _join(self) -> None:
        """Ping bootstrap and remembered peers, then look for the nodes nearest to this one."""
        num_before = self.num_neighbours
        candidates = [*self._bootstrap, *(peer for peer in self._remembered if peer not in self._bootstrap)]
        if num_before:  # joined already: ping only a few
            self._runtime.random.shuffle(candidates)
            candidates = candidates[:8]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(JOIN_SECONDS):
                await together("meet", (self._meet(peer) for peer in candidates))
                if self.num_neighbours:
                    await self._node.find_nearest_nodes([self._node.node_id])
        if self.num_neighbours and not num_before:
            logger.info("joined the directory; neighbours: %d", self.num_neighbours)

    async def _meet(self, peer: str) -> None:
        """Ping a peer to update both routing tables and to measure the clock skew."""
        protocol, peer_id = self._node.protocol, PeerID.from_base58(peer)
        try:
            if peer in self._bootstrap and peer_id not in protocol.routing_table:
                await self._transport.connect(self._bootstrap[peer], RPC_SECONDS)
            before = self._runtime.clock()
            request = dht_pb2.PingRequest(peer=protocol.node_info, validate=False)
            response = await protocol.get_stub(peer_id).rpc_ping(request, timeout=RPC_SECONDS)
            middle = (before + self._runtime.clock()) / 2
        except PeerError as error:
            logger.debug("directory: %s", error)
            return
        except Exception as error:  # hivemind raises many kinds; the peer did not answer
            logger.debug("directory: peer %s did not answer: %r", peer[-8:], error)
            return
        if response.dht_time:
            self._skews[peer] = middle - response.dht_time
        if response.peer and response.peer.node_id:
            await protocol.update_routing_table(DHTID.from_bytes(response.peer.node_id), peer_id, responded=True)


class _PendingCalls(dict[Any, Any]):
    """hivemind's pending unary calls, without cancelled ones.

    Otherwise an answer to a call just cancelled would raise in hivemind's reader task, and all later calls would hang.
    """

    def __contains__(self, call: object) -> bool:
        future = self.get(call)
        return future is not None and not future.done()


async def _attach(transport: Libp2pTransport) -> Any:
    """Return a hivemind ``P2P`` on the transport's daemon, with its socket in the daemon's folder."""
    attached: Any = type("AttachedP2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{transport.daemon.directory}/"})
    p2p = await attached.replicate(Multiaddr(f"/unix{transport.daemon.control_socket}"))
    control = p2p._client.control
    control._pending_calls = _PendingCalls()
    for task in (control._read_task, control._write_task):
        # Retrieve the exception: these tasks fail when the daemon dies, which the transport reports.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return p2p
