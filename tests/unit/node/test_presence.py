"""Being seen and seeing: records of others are believed under their own ids, and the loops go on after a defect."""

import asyncio
from typing import Any

import pytest

from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.network.directory import Directory, Entry
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.node.presence import LIFETIME_SECONDS, Presence
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
    rpc = Rpc(peer.transport, peer.runtime, SWARM)
    presence = Presence(lambda: directory, rpc, peer.signer, Membership(peer.peer_id, peer.runtime), lambda: record)
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
    assert "presence-directory failed" in caplog.text
    assert "starting it again" in caplog.text
