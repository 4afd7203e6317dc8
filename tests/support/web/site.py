"""The web application over peers that a test makes up, asked without a network."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.types import ASGIApp

from p2ptrain.monitor.store import Store
from p2ptrain.monitor.watch import Watch
from p2ptrain.monitor.web import make_app
from p2ptrain.network.http_server import Guard
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.status.views import SwarmView
from tests.support.web.stores import watched
from tests.support.web.watched import SWARM, FakeSource


@dataclass
class Site:
    app: ASGIApp
    client: httpx.AsyncClient
    watch: Watch
    source: FakeSource
    store: Store

    async def get(self, path: str, **asked: object) -> httpx.Response:
        return await self.client.get(path, params={name: str(value) for name, value in asked.items()})

    async def json(self, path: str, **asked: object) -> Any:
        response = await self.get(f"/api/v1{path}", **asked)
        assert response.status_code == 200, response.text
        return response.json()


@asynccontextmanager
async def served(*records: PeerRecord, looks: int = 1, swarm: SwarmView = SWARM) -> AsyncIterator[Site]:
    """Serve a page over these peers, after so many looks."""
    async with watched(*records, swarm=swarm, bootstraps=["gone"]) as found:
        app = make_app(found.watch, found.store, found.source.now)
        transport = httpx.ASGITransport(Guard(app, ["monitor"]), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://monitor") as client:
            for _ in range(looks):
                await found.watch.look()
                found.source.time += 2.0
            yield Site(app, client, found.watch, found.source, found.store)
