"""A node of the directory bounds what it stores for strangers."""

import msgpack
import pytest
from hivemind.dht.node import DHTID
from hivemind.dht.storage import DHTLocalStorage
from hivemind.dht.validation import DHTRecord

from p2ptrain.network.libp2p import directory as libp2p_directory
from p2ptrain.network.libp2p.directory import DHTRecordGuard
from p2ptrain.network.records.record import RecordGuard, peers_key, seal_record
from tests.support.signers import NamedSigner

SWARM = b"s" * 32
EXPIRES_AT = 4e9
KEY = DHTID.generate(peers_key(SWARM))


def _record(peer: str, sequence: int = 1) -> DHTRecord:
    value = seal_record("peer", SWARM, {}, sequence, EXPIRES_AT, NamedSigner(peer))
    return DHTRecord(KEY.to_bytes(), msgpack.packb(peer), msgpack.packb(value), EXPIRES_AT)


def _store(storage: DHTLocalStorage, record: DHTRecord) -> None:
    storage.store_subkey(KEY, msgpack.unpackb(record.subkey), record.value, record.expiration_time)


@pytest.mark.fault(35)
def test_a_key_that_is_full_takes_newer_records_of_its_peers_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libp2p_directory, "MAX_SUBKEYS", 3)
    guard = DHTRecordGuard(RecordGuard(SWARM, NamedSigner("verifier"), lambda: EXPIRES_AT - 60.0))
    guard.storage = DHTLocalStorage()
    for peer in ("a", "b", "c"):
        record = _record(peer)
        assert guard.validate(record)
        _store(guard.storage, record)
    assert not guard.validate(_record("d"))
    assert guard.refused == 1
    assert guard.validate(_record("b", sequence=2))
