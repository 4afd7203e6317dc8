"""Snapshots of a swarm for terminals, the same as those of the status page."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from p2ptrain.network.records.record import Look, Sighting
from p2ptrain.status.agreed import bootstraps, swarm_view
from p2ptrain.status.snapshot import build_snapshot
from p2ptrain.status.tracker import SwarmTracker

if TYPE_CHECKING:
    from p2ptrain.manifest import SignedManifest
    from p2ptrain.network.link import SwarmLink
    from p2ptrain.node.peer import Peer
    from p2ptrain.status.views import Snapshot


class Looking:
    """Observes a swarm through ``source``, such as `p2ptrain.node.observe.Observer.look`."""

    def __init__(self, source: Callable[[], Awaitable[Look]], signed: SignedManifest, link: SwarmLink) -> None:
        self._source = source
        self._signed = signed
        self._link = link
        self._tracker: SwarmTracker | None = None

    async def look(self) -> Snapshot:
        look = await self._source()
        tracker = self._tracker
        if tracker is None:
            swarm = swarm_view(self._signed, self._link, [each.record for each in look.sightings or ()])
            tracker = SwarmTracker(swarm, look.at, bootstraps(self._link))
            self._tracker = tracker if look.sightings is not None else None  # The stages may come from the records.
        tracker.take_in(look)
        return await asyncio.to_thread(build_snapshot, tracker.observation(), look.at)


class OwnView:
    """A source of looks from the records that a peer already holds, without network queries."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._seen: dict[str, Sighting] = {}

    async def __call__(self) -> Look:
        """Return this peer's current record and the other peers' records, each with the time of its first sighting."""
        peer, now, before = self._peer, self._peer.runtime.now(), self._seen
        rejected = peer.presence.reader.rejected
        if not peer.presence.directory_answers:
            return Look(now, None, rejected)
        self._seen = {}
        for record in [peer.record.describe(), *peer.membership.records()]:
            known = before.get(record.peer)
            self._seen[record.peer] = known if known is not None and known.record is record else Sighting(record, now)
        return Look(now, list(self._seen.values()), rejected)
