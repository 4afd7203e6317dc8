"""Histories and watches for one scenario, and peers to keep in them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2ptrain.monitor.store import Store
from p2ptrain.monitor.watch import LOOK_SECONDS, Watch
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.status.tracker import SwarmTracker
from p2ptrain.status.views import PeerView, Snapshot, SwarmView
from tests.support.web.watched import START, SWARM, FakeSource, trainer, views_of


@asynccontextmanager
async def open_store(path: Path | None = None, swarm: str = SWARM.digest) -> AsyncIterator[Store]:
    store = await Store.open(path, swarm, START)
    try:
        yield store
    finally:
        await store.close()


@dataclass
class Watched:
    """A watch, what it looks at, and what it keeps."""

    watch: Watch
    source: FakeSource
    store: Store

    async def look(self, *records: PeerRecord, seconds: float = LOOK_SECONDS) -> Snapshot:
        """Let time pass, look at these peers or those of before, and let what that started come to its end."""
        if records:
            self.source.records = list(records)
        self.source.time += seconds
        snapshot = await self.watch.look()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
        return snapshot

    async def kinds(self) -> list[tuple[str, str]]:
        """Return what kinds of events were told, and of whom, oldest first."""
        return [(event.kind, event.peer) for event in reversed(await self.store.events(0.0, 100))]


@asynccontextmanager
async def watched(
    *records: PeerRecord, swarm: SwarmView = SWARM, notify: Any = None, **options: Any
) -> AsyncIterator[Watched]:
    """Watch these peers, of which nothing was looked at yet; ``options`` are those of `SwarmTracker`."""
    source = FakeSource(*records)
    async with open_store(swarm=swarm.digest) as store:
        yield Watched(Watch(source, SwarmTracker(swarm, START, **options), store, notify), source, store)


def peer(id: str = "a", **changes: object) -> PeerView:
    return views_of(trainer(id, **changes))[0]
