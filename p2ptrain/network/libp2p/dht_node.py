"""A node of the swarm's DHT: hivemind's protocol, with bounds on what other nodes can make this one do.

* A node's id is the hash of its libp2p peer id. A contact with another id is ignored, so nobody chooses an id near a
  key.
* A node stores only this swarm's shards, each as a bounded `Sample`, and only records that their signer hands over
  itself. Replication among nodes is off: each peer publishes again soon enough.
* Requests and replies are bounded before anything in them is verified.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection
from typing import Any

import msgpack
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.timed_storage import ValueWithExpiration

from p2ptrain.errors import IntegrityError
from p2ptrain.network.directory import MAX_SUBKEYS, Entry, Sample
from p2ptrain.network.records.record import MAX_RECORD_BYTES, NUM_SHARDS, RecordGuard, peers_key, shard_of
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)

MAX_PACKED_BYTES = MAX_RECORD_BYTES + 8
MAX_SUBKEY_BYTES = 256


def node_id_of(peer: Any) -> Any:
    return DHTID.from_bytes(hashlib.sha256(b"p2ptrain node" + peer.to_bytes()).digest()[: DHTID.HASH_NBYTES])


class DHTRecordGuard(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types
    """hivemind's record validator, on a `RecordGuard`; knows the swarm's keys."""

    def __init__(self, guard: RecordGuard, swarm: bytes) -> None:
        self.refused = 0
        self.keys = {DHTID.generate(peers_key(swarm, shard)): shard for shard in range(NUM_SHARDS)}
        self._guard = guard

    def validate(self, record: DHTRecord) -> bool:
        """True if the key is of this swarm, and the subkey's peer sealed the record, for this shard and expiry."""
        try:
            self._check(record)
        except (IntegrityError, ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
            return self.refuse(str(error))
        return True

    def refuse(self, reason: str) -> bool:
        """Count a refusal; return False."""
        self.refused += 1
        logger.debug("record refused: %s", reason)
        return False

    def _check(self, record: DHTRecord) -> None:
        if len(record.value) > MAX_PACKED_BYTES or len(record.subkey) > MAX_SUBKEY_BYTES:
            raise ValueError("it is too large")
        shard = self.keys.get(int.from_bytes(record.key, "big"))
        if shard is None:
            raise ValueError("its key is none of this swarm's")
        peer, expires_at = self._guard.check(msgpack.unpackb(record.value, raw=False))
        if msgpack.unpackb(record.subkey, raw=False) != peer or expires_at != record.expiration_time:
            raise ValueError("its subkey or expiry is not what was signed")
        if shard_of(peer) != shard:
            raise ValueError("it belongs to another shard")


class ShardStorage:
    """The part of hivemind's ``DHTLocalStorage`` that nodes use, with a bounded sample for each of the swarm's keys."""

    def __init__(self, keys: Collection[Any], now: Callable[[], float]) -> None:
        self._samples = {key: Sample(hex(key)) for key in keys}
        self._now = now

    def store(self, key: Any, value: bytes, expiration_time: float, subkey: Any = None) -> bool:
        sample = self._samples.get(key)
        return sample is not None and sample.put(subkey, Entry(value, expiration_time), self._now())

    def get(self, key: Any) -> Any:
        """Return a copy, since hivemind merges other nodes' replies into it; None without records."""
        entries = self._samples[key].entries(self._now()) if key in self._samples else {}
        if not entries:
            return None
        found = DictionaryDHTValue()
        for peer, entry in entries.items():
            found.store(peer, entry.value, entry.expires_at)
        return ValueWithExpiration(found, found.latest_expiration_time)


class SwarmProtocol(DHTProtocol):  # type: ignore[misc]
    """hivemind's protocol between nodes, within this module's bounds; its validator is a `DHTRecordGuard`."""

    _rpc_handlers = _stub_type = None  # not those of the base class

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.tasks = Tasks()

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """Store the caller's own records, one for each shard at most."""
        if request.peer.node_id:
            await self.rpc_ping(dht_pb2.PingRequest(peer=request.peer), context)
        caller = context.remote_id.to_base58()
        own, stored = self.serializer.dumps(caller), []
        items = list(zip(request.keys, request.subkeys, request.values, request.expiration_time, strict=False))
        for key, subkey, value, expires_at in items[:NUM_SHARDS]:
            if subkey != own:
                stored.append(self.record_validator.refuse("its signer does not hand it over itself"))
            else:
                is_valid = self._validate_record(key, subkey, value, expires_at)
                stored.append(is_valid and self.storage.store(DHTID.from_bytes(key), value, expires_at, caller))
        return dht_pb2.StoreResponse(store_ok=stored, peer=self.node_info)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """See hivemind; for a bounded number of keys."""
        if len(request.keys) > NUM_SHARDS:
            raise ValueError(f"at most {NUM_SHARDS} keys in one request")
        return await super().rpc_find(request, context)

    async def call_find(self, peer: PeerID, keys: Collection[Any]) -> dict[Any, tuple[Any, dict[Any, Any]]] | None:
        """See hivemind; without neighbours whose id is not the hash of their peer id, and only the nearest.

        A reply says itself until when it holds, which would end the search; the newest of its records says so here.
        """
        found = await super().call_find(peer, keys)
        return found and {
            key: (value and _dated(value.value), self._genuine(key, nearest)) for key, (value, nearest) in found.items()
        }

    def _genuine(self, key: Any, nearest: dict[Any, Any]) -> dict[Any, Any]:
        ordered = sorted(nearest, key=key.xor_distance)[: self.bucket_size]
        return {node_id: nearest[node_id] for node_id in ordered if node_id == node_id_of(nearest[node_id])}

    async def update_routing_table(self, node_id: Any, peer_id: PeerID, responded: bool = True) -> None:
        """Note a contact that asked or answered, or drop one that did not answer."""
        table = self.routing_table
        if not responded:
            node_id = table.get(peer_id=peer_id) if node_id is None else node_id  # After a ping.
            if node_id is not None and node_id in table:
                del table[node_id]
            return
        if node_id != node_id_of(peer_id):
            logger.debug("ignored a contact with a chosen id: peer %s", peer_id.to_base58()[-8:])
            return
        bucket = table.buckets[table.get_bucket_index(node_id)]
        if node_id not in table and len(bucket.replacement_nodes) >= bucket.size:
            return
        if (oldest := table.add_or_update_node(node_id, peer_id)) is not None:
            self.tasks.start(self.call_ping(oldest[1]), "ping-oldest")

    def _validate_dictionary(self, key_bytes: bytes, dictionary: Any) -> bool:
        """True if a node's reply holds at most a sample, and each record is valid."""
        if not isinstance(dictionary, DictionaryDHTValue) or len(dictionary.data) > MAX_SUBKEYS:
            return bool(self.record_validator.refuse("a reply is no sample"))
        return bool(super()._validate_dictionary(key_bytes, dictionary))


def _dated(dictionary: Any) -> Any:
    """Return a copy of a reply's verified records, with the latest of their expiries."""
    records = DictionaryDHTValue()
    for subkey, item in dictionary.items():
        records.store(subkey, item.value, item.expiration_time)
    return ValueWithExpiration(records, records.latest_expiration_time)
