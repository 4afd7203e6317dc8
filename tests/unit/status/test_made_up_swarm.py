"""The made-up swarm says what a real one could, and the page of one of any size is whole."""

import asyncio

import httpx
import pytest

from p2ptrain.monitor.watch import Watch
from p2ptrain.monitor.web import make_app
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.status.tracker import SwarmTracker
from tests.support.web.made_up_swarm import MadeUpSwarm
from tests.support.web.stores import open_store

START = 1_800_000_000.0


class _Clock:
    def __init__(self) -> None:
        self.time = START

    def __call__(self) -> float:
        return self.time


async def _pages(swarm: MadeUpSwarm, clock: _Clock, *paths: str) -> list[httpx.Response]:
    """What a browser gets after a minute in which the swarm was watched."""
    async with open_store(swarm=swarm.swarm.digest) as store:
        watch = Watch(swarm, SwarmTracker(swarm.swarm, clock()), store)
        for _ in range(20):
            await watch.look()
            await asyncio.sleep(0)  # Lets the certificates be fetched.
            clock.time += 3
        transport = httpx.ASGITransport(make_app(watch, store, swarm.now))
        async with httpx.AsyncClient(transport=transport, base_url="http://page") as client:
            return [await client.get(path) for path in paths]


def test_its_records_are_those_that_peers_may_publish() -> None:
    clock = _Clock()
    seen = asyncio.run(MadeUpSwarm(60, clock=clock).look()).sightings
    assert seen is not None
    for record, at in [(each.record, each.at) for each in seen]:
        payload = {**record.to_payload(), "last_rounds": [vars(report) for report in record.last_rounds]}
        assert PeerRecord.from_payload(record.peer, payload) == record
        assert at <= clock()


@pytest.mark.parametrize("num_peers", [0, 1, 3, 60])
def test_the_page_of_a_swarm_of_any_size_is_whole(num_peers: int) -> None:
    clock = _Clock()
    swarm = MadeUpSwarm(num_peers, clock=clock)
    (page,) = asyncio.run(_pages(swarm, clock, "/"))
    assert page.status_code == 200
    for part in ("headline", "coverage", "charts", "rounds", "groups", "peers", "leaders", "events", "join"):
        assert f'<section id="{part}"' in page.text
    assert page.text.count("<h1") == 1
