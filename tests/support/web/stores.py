"""Histories and watches for one scenario, and peers to keep in them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from p2ptrain.monitor.store import Store
from p2ptrain.monitor.watch import Watch
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.status.tracker import SwarmTracker
from p2ptrain.status.views import PeerView, SwarmView
from tests.support.web.watched import START, SWARM, FakeSource, trainer, views_of


@asynccontextmanager
async def open_store(path: Path | None = None, swarm: str = SWARM.digest) -> AsyncIterator[Store]:
    """Open a store at ``path``, or in memory."""
    store = await Store.open(path, swarm, START)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def watched(
    *records: PeerRecord, swarm: SwarmView = SWARM, notify: Any = None, **options: Any
) -> AsyncIterator[tuple[Watch, FakeSource, Store]]:
    """Watch these peers, of which nothing was looked at yet; ``options`` are those of `SwarmTracker`."""
    source = FakeSource(*records)
    async with open_store(swarm=swarm.digest) as store:
        yield Watch(source, SwarmTracker(swarm, START, **options), store, notify), source, store


def peer(id: str = "a", **changes: object) -> PeerView:
    """A trainer, as it is shown."""
    return views_of(trainer(id, **changes))[0]
