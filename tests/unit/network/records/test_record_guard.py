"""What a node of the directory stores for strangers is bounded, and nobody chooses which records those are."""

from itertools import count

import msgpack
import pytest
from hivemind.dht.node import DHTID
from hivemind.dht.validation import DHTRecord

from p2ptrain.errors import IntegrityError
from p2ptrain.network.directory import EPOCH_SECONDS, MAX_SUBKEYS, Entry, Sample
from p2ptrain.network.libp2p.dht_node import DHTRecordGuard, ShardStorage
from p2ptrain.network.records import record as records
from p2ptrain.network.records.record import (
    MAX_RECORD_BYTES,
    NUM_SHARDS,
    RecordGuard,
    peers_key,
    seal_record,
    shard_of,
)
from tests.support.signers import NamedSigner

SWARM, OTHER_SWARM = b"s" * 32, b"o" * 32
NOW = 4e9
EXPIRES_AT = NOW + 60.0
PEERS = [f"peer {number}" for number in range(400)]


def _guard() -> DHTRecordGuard:
    return DHTRecordGuard(RecordGuard(SWARM, NamedSigner("verifier"), lambda: NOW), SWARM)


def _record(peer: str, key: str | None = None, *, payload: int = 0) -> DHTRecord:
    value = seal_record(SWARM, {"text": "x" * payload}, 1, EXPIRES_AT, NamedSigner(peer))
    key_id = DHTID.generate(key or peers_key(SWARM, shard_of(peer)))
    return DHTRecord(key_id.to_bytes(), msgpack.packb(peer), msgpack.packb(value), EXPIRES_AT)


@pytest.mark.fault(35)
def test_only_the_swarm_s_keys_are_stored_and_each_record_under_its_own() -> None:
    guard = _guard()
    assert guard.validate(_record("a"))
    foreign = [
        peers_key(OTHER_SWARM, shard_of("a")),
        peers_key(SWARM, (shard_of("a") + 1) % NUM_SHARDS),
        f"p2ptrain/{SWARM.hex()}/peers",
        "anything",
    ]
    for refused, key in enumerate(foreign, 1):
        assert not guard.validate(_record("a", key))
        assert guard.refused == refused
        storage = ShardStorage(guard.keys, lambda: NOW)
        assert storage.store(DHTID.generate(key), b"value", EXPIRES_AT, "a") == (key == foreign[1])
    assert len(guard.keys) == NUM_SHARDS <= 8


@pytest.mark.fault(35)
def test_a_record_of_more_than_4_kb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_RECORD_BYTES == 4096
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 1 << 20)  # a liar does not check itself
    large = _record("a", payload=4096)
    monkeypatch.undo()
    assert not _guard().validate(large)


@pytest.mark.fault(35)
def test_a_refused_record_is_not_verified_again(monkeypatch: pytest.MonkeyPatch) -> None:
    verified = list[str]()
    verifier = NamedSigner("verifier")
    monkeypatch.setattr(verifier, "verify", lambda peer, message, proof: verified.append(peer))
    guard = DHTRecordGuard(RecordGuard(SWARM, verifier, lambda: NOW), SWARM)
    record = _record("a")
    assert [guard.validate(record) for _ in range(5)] == [False] * 5
    assert (guard.refused, verified) == (5, ["a"])


@pytest.mark.fault(45)
def test_a_full_shard_keeps_a_sample_that_does_not_depend_on_the_order_and_changes_by_the_hour() -> None:
    def kept(order: list[str], now: float) -> set[str]:
        sample = Sample("key")
        for peer in order:
            sample.put(peer, Entry(b"value", now + 60), now)
        return set(sample.entries(now))

    first = kept(PEERS, NOW)
    assert len(first) == MAX_SUBKEYS
    assert kept(PEERS[::-1], NOW) == first
    assert len(kept(PEERS, NOW + EPOCH_SECONDS) & first) < MAX_SUBKEYS / 2


@pytest.mark.fault(45)
def test_what_a_node_stores_and_answers_is_bounded_however_many_peers_there_are() -> None:
    storage = ShardStorage(_guard().keys, lambda: NOW)
    for peer in PEERS:
        storage.store(DHTID.generate(peers_key(SWARM, shard_of(peer))), bytes(4096), EXPIRES_AT, peer)
    for shard in range(NUM_SHARDS):
        found = storage.get(DHTID.generate(peers_key(SWARM, shard)))
        assert len(found.value.data) == MAX_SUBKEYS
        assert len(found.value.packb()) < 1 << 18
        found.value.clear()  # hivemind changes what it gets
        assert len(storage.get(DHTID.generate(peers_key(SWARM, shard))).value.data) == MAX_SUBKEYS


def test_newer_records_replace_older_ones_and_expired_ones_make_room() -> None:
    sample, numbers = Sample("key"), count()
    assert sample.put("a", Entry(b"1", NOW + 10), NOW)
    assert sample.put("a", Entry(b"2", NOW + 20), NOW)
    assert not sample.put("a", Entry(b"1", NOW + 10), NOW)
    assert not sample.put("b", Entry(b"1", NOW), NOW)
    assert sample.entries(NOW) == {"a": Entry(b"2", NOW + 20)}
    for _ in range(MAX_SUBKEYS):
        assert sample.put(f"peer {next(numbers)}", Entry(b"1", NOW + 60), NOW + 20)
    assert "a" not in sample.entries(NOW + 20)


@pytest.mark.fault(43)
def test_a_refused_record_leaves_nothing_of_itself() -> None:
    guard = RecordGuard(SWARM, NamedSigner("verifier"), lambda: NOW)
    with pytest.raises(IntegrityError):
        guard.check(msgpack.packb([{}] * 100))
    (kept,) = guard._checked.values()
    assert isinstance(kept, IntegrityError)
    assert (kept.__cause__, kept.__context__, kept.__traceback__) == (None, None, None)
