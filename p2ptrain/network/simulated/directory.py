"""The `Directory` of a simulated peer: one store per side of a partition, eventually consistent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from p2ptrain.network.directory import Directory, Entry, Sample
from p2ptrain.network.records.record import MAX_RECORD_BYTES

if TYPE_CHECKING:
    from p2ptrain.network.simulated.network import SimulatedNetwork, SimulatedPeer

REQUEST_SECONDS = (0.010, 0.100)
PROPAGATION_SECONDS = (0.0, 0.300)


class Store:
    """Records shared by the peers on one side of a partition: the stored versions per subkey, by expiry."""

    def __init__(self) -> None:
        self._versions: dict[str, dict[str, list[tuple[float, Entry]]]] = {}

    def put(self, key: str, subkey: str, entry: Entry, visible_at: float) -> bool:
        """Store a version visible from loop time ``visible_at``; False if another version expires no earlier."""
        versions = self._versions.setdefault(key, {}).setdefault(subkey, [])
        if versions and versions[-1][1].expires_at >= entry.expires_at:
            return versions[-1][1] == entry
        versions.append((visible_at, entry))
        return True

    def get(self, key: str, loop_time: float, wall_time: float) -> dict[str, Entry]:
        """Return a sample of the latest visible versions that have not expired at ``wall_time``."""
        found = Sample(key)
        for subkey, versions in self._versions.get(key, {}).items():
            visible = [version for version in versions if version[0] <= loop_time]
            if visible:
                del versions[: versions.index(visible[-1])]
                found.put(subkey, visible[-1][1], wall_time)
        return found.entries(wall_time)

    def copy(self) -> Store:
        copy = Store()
        copy.merge(self)
        return copy

    def merge(self, other: Store) -> None:
        """Add the records of ``other``."""
        for key, subkeys in other._versions.items():
            for subkey, versions in subkeys.items():
                for visible_at, entry in versions:
                    self.put(key, subkey, entry, visible_at)


class SimulatedDirectory(Directory):
    """One peer's access to the store of its side of the network; created by `SimulatedNetwork.add_peer`.

    Each request takes ``delay_seconds`` longer; while ``failing`` is True, no request gets an answer.
    """

    def __init__(self, network: SimulatedNetwork, peer: SimulatedPeer) -> None:
        self.delay_seconds = 0.0
        self.failing = False
        self._network = network
        self._peer = peer
        self._closed = False

    async def publish(self, key: str, subkey: str, value: bytes, expires_at: float, timeout_seconds: float) -> bool:
        network = self._network
        if not await self._request(timeout_seconds):
            return False
        value = bytes(value)
        if len(value) > MAX_RECORD_BYTES or expires_at <= network.wall_time():
            return False
        visible_at = network.loop.time() + network.random.uniform(*PROPAGATION_SECONDS)
        stored = network.store_of(self._peer).put(key, subkey, Entry(value, expires_at), visible_at)
        network.record("publish", self._peer.name, key, subkey, stored)
        return stored

    async def look_up(self, key: str, timeout_seconds: float) -> dict[str, Entry] | None:
        """See `Directory.look_up`; this peer's own clock decides the expiry."""
        if not await self._request(timeout_seconds):
            return None
        network = self._network
        found = network.store_of(self._peer).get(key, network.loop.time(), self._peer.runtime.now())
        network.record("look up", self._peer.name, key, len(found))
        return found

    async def close(self) -> None:
        self._closed = True

    async def _request(self, timeout_seconds: float) -> bool:
        """Wait for the duration of a request; False if it gets no answer."""
        if self._closed or not self._peer.alive:
            return False
        duration = self._network.random.uniform(*REQUEST_SECONDS) + self.delay_seconds
        if self.failing or self._network.isolated(self._peer) or duration > timeout_seconds:
            await asyncio.sleep(timeout_seconds)
            return False
        await asyncio.sleep(duration)
        return not self._closed and self._peer.alive and not self._network.isolated(self._peer)
