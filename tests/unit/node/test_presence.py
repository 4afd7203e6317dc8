"""Being seen and seeing: records of others are believed under their own ids, and the loops go on after a defect."""

import asyncio
import logging
from typing import Any

import pytest

from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.manifest import Manifest, SignedManifest
from p2ptrain.network.admission import Admission, Issuer, Revocations, mark
from p2ptrain.network.directory import Directory, Entry
from p2ptrain.network.records.record import PeerRecord, peers_key, seal_record
from p2ptrain.network.schema import to_bytes
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.node.presence import LIFETIME_SECONDS, RECORD_KIND, Presence, RecordReader
from tests.support.coroutines import simulated
from tests.support.web.watched import trainer

SWARM = bytes(32)


class FlakyDirectory(Directory):
    """The directory of a peer, whose next calls raise what nobody expects."""

    def __init__(self, within: Directory) -> None:
        self._within = within
        self.defects: list[Exception] = []
        self.published_at: list[float] = []
        self.looked_at: list[float] = []

    def _fail(self) -> None:
        if self.defects:
            raise self.defects.pop()

    async def publish(self, key: str, subkey: str, value: bytes, expires_at: float, timeout_seconds: float) -> bool:
        self._fail()
        self.published_at.append(asyncio.get_running_loop().time())
        return await self._within.publish(key, subkey, value, expires_at, timeout_seconds)

    async def look_up(self, key: str, timeout_seconds: float) -> dict[str, Entry] | None:
        self._fail()
        self.looked_at.append(asyncio.get_running_loop().time())
        return await self._within.look_up(key, timeout_seconds)

    async def close(self) -> None:
        await self._within.close()


@simulated()
async def test_a_peer_stays_visible_after_a_defect_in_its_presence(
    network: SimulatedNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    peer = network.add_peer("ada")
    directory = FlakyDirectory(peer.directory)
    record: PeerRecord = trainer(peer.peer_id)
    presence = Presence(
        lambda: directory, peer.runtime, SWARM, peer.signer, Membership(peer.peer_id, peer.runtime), lambda: record
    )
    await presence.start()
    directory.defects = [ZeroDivisionError("a defect") for _ in range(4)]
    await asyncio.sleep(2 * LIFETIME_SECONDS)
    assert directory.defects == []
    now = asyncio.get_running_loop().time()
    assert now - directory.published_at[-1] < LIFETIME_SECONDS
    assert now - directory.looked_at[-1] < LIFETIME_SECONDS
    await presence.close()
    await peer.close()
    lost: list[dict[str, Any]] = network.loop.errors
    assert [type(each["exception"]) for each in lost] == [ZeroDivisionError] * 4
    lost.clear()
    assert "presence-refresh failed" in caplog.text
    assert "starting it again" in caplog.text


@simulated()
async def test_a_record_that_is_stored_under_another_peers_id_is_dropped_and_counted_once(
    network: SimulatedNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ada, bob = network.add_peer("ada"), network.add_peer("bob")
    expires_at = ada.runtime.now() + LIFETIME_SECONDS
    payload = trainer(ada.peer_id).to_payload()
    sealed = seal_record(RECORD_KIND, SWARM, payload, 1, expires_at, ada.signer)
    for subkey in (ada.peer_id, bob.peer_id):
        assert await bob.directory.publish(peers_key(SWARM), subkey, sealed, expires_at, 5.0)
    await asyncio.sleep(5.0)
    reader = RecordReader(lambda: bob.directory, SWARM, bob.signer)
    for _ in range(3):
        found = await reader.read(5.0)
        assert found is not None
        assert [record.peer for record, *_ in found] == [ada.peer_id]
    assert reader.rejected == 1
    assert caplog.text.count("dropped the record") == 1
    for peer in (ada, bob):
        await peer.close()


@pytest.mark.fault(37)
@simulated()
async def test_records_of_strangers_are_dropped_and_counted_once_and_a_seeds_record_tells_of_bans(
    network: SimulatedNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    seed, ada, eve = (network.add_peer(name) for name in ("seed", "ada", "eve"))
    manifest = SignedManifest.create(Manifest(), seed.signer, seed.peer_id).manifest
    issuer = Issuer(manifest, seed.signer)
    swarm, admission = manifest.digest, Admission(manifest, seed.runtime.now)
    passes = {peer.peer_id: to_bytes(admission.use(issuer.standing_invite(), peer.peer_id)) for peer in (ada, seed)}

    async def publish(sequence: int, revocations: bytes = b"") -> None:
        for peer, shown in ((seed, b""), (ada, passes[ada.peer_id]), (eve, passes[seed.peer_id])):
            record = trainer(peer.peer_id, credential=shown, revocations=revocations if peer is seed else b"")
            expires_at = peer.runtime.now() + LIFETIME_SECONDS
            sealed = seal_record(RECORD_KIND, swarm, record.to_payload(), sequence, expires_at, peer.signer)
            assert await peer.directory.publish(peers_key(swarm), peer.peer_id, sealed, expires_at, 5.0)
        await asyncio.sleep(5.0)

    async def read() -> set[str]:
        found = await reader.read(5.0)
        assert found is not None
        return {record.peer for record, *_ in found}

    reader = RecordReader(lambda: seed.directory, swarm, seed.signer)
    for sequence in (1, 2):
        await publish(sequence)
        assert await read() == {seed.peer_id, ada.peer_id, eve.peer_id}
    reader.admission = admission
    for sequence in (3, 4):
        await publish(sequence)
        assert await read() == {seed.peer_id, ada.peer_id}
        assert {peer: why for peer, (_, why) in reader.strangers.items()} == {
            eve.peer_id: "its pass is not signed for this peer and swarm"
        }
    assert reader.rejected == 1
    assert caplog.text.count("dropped the records") == 1
    await publish(5, issuer.sign(Revocations(1, banned=(mark(ada.peer_id),))))
    assert await read() == {seed.peer_id}
    for peer in (seed, ada, eve):
        await peer.close()
