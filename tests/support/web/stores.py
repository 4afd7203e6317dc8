"""A store for one scenario, and peers to keep in it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from p2ptrain.monitor.store import Store
from p2ptrain.status.views import PeerView
from tests.support.web.watched import START, trainer, views_of

T = TypeVar("T")
SWARM = "ab" * 32


def with_store(path: Path | None, use: Callable[[Store], Awaitable[T]], swarm: str = SWARM) -> T:
    """What ``use`` returns, given a store at ``path``, or in memory."""

    async def main() -> T:
        store = await Store.open(path, swarm, START)
        try:
            return await use(store)
        finally:
            await store.close()

    return asyncio.run(main())


def peer(id: str = "a", **changes: object) -> PeerView:
    """A trainer, as it is shown."""
    return views_of(trainer(id, **changes))[0]
