"""The status page's own view of a swarm for terminals, so that both say the same: a `Watch` with history in memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from p2ptrain.averaging.protocol.certificate import Certificate
    from p2ptrain.monitor.watch import Source, Watch
    from p2ptrain.network.link import SwarmLink
    from p2ptrain.network.records.record import PeerRecord
    from p2ptrain.node.observe import Observer
    from p2ptrain.node.peer import Peer


class Remembering:
    """A source that keeps what it was told last, for tables.

    Attributes:
        records: Of the last look that was answered.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.records: list[PeerRecord] = []

    @property
    def rejected(self) -> int:
        """See `Source.rejected`."""
        return self._observer.rejected

    def now(self) -> float:
        """See `Source.now`."""
        return self._observer.now()

    async def look(self) -> Sequence[tuple[PeerRecord, float]] | None:
        """See `Source.look`."""
        seen = await self._observer.look()
        if seen is not None:
            self.records = [record for record, _ in seen]
        return seen

    async def certificates_after(self, peer: str, lineage: bytes) -> Sequence[Certificate]:
        """See `Source.certificates_after`."""
        return await self._observer.certificates_after(peer, lineage)


class OwnView:
    """The swarm as one of its peers knows it anyway: a source that asks nobody."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._seen: dict[str, tuple[PeerRecord, float]] = {}

    @property
    def rejected(self) -> int:
        """See `Source.rejected`."""
        return self._peer.presence.reader.rejected

    def now(self) -> float:
        """See `Source.now`."""
        return self._peer.runtime.now()

    async def look(self) -> Sequence[tuple[PeerRecord, float]] | None:
        """This peer as of now, and what it knows of the others, with the time at which it learnt that."""
        if not self._peer.presence.directory_answers:
            return None
        now, before = self.now(), self._seen
        self._seen = {}
        for record in [self._peer.describe(), *self._peer.membership.records()]:
            known = before.get(record.peer)
            self._seen[record.peer] = known if known is not None and known[0] is record else (record, now)
        return list(self._seen.values())

    async def certificates_after(self, peer: str, lineage: bytes) -> Sequence[Certificate]:
        """None: reports say enough, and the others have better things to do."""
        return []


@contextlib.asynccontextmanager
async def watch_over(source: Source, manifest: Observer | Peer, link: SwarmLink) -> AsyncIterator[Watch]:
    """A watch that forgets everything when it ends; whoever has it calls `Watch.look`.

    Args:
        source: Where records come from.
        manifest: Who knows what the swarm agreed on.
        link: The swarm's.
    """
    from p2ptrain.monitor.store import Store
    from p2ptrain.monitor.watch import Watch
    from p2ptrain.status.agreed import bootstraps, swarm_view, what_is_missing

    # What it would log is on the screen.
    logging.getLogger("p2ptrain.monitor.watch").setLevel(logging.ERROR)
    seen = await source.look() if what_is_missing(manifest.manifest) else None
    swarm = swarm_view(manifest.signed, link, [record for record, _ in seen or ()])
    store = await Store.open(None, swarm.digest, source.now())
    try:
        yield Watch(source, swarm, store, bootstraps=bootstraps(link))
    finally:
        await store.close()
