"""How a peer finds out how it is reached, without daemons; tests/swarm/test_reachability.py has real ones."""

import asyncio
from typing import Any

import pytest

from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.network.libp2p.settings import Libp2pSettings
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.node.nat import reach
from p2ptrain.node.nat.relaying import RELAY_ATTEMPTS
from tests.support.coroutines import simulated

SECONDS = 4000.0


class Daemon:
    """The transport of a relay that nobody has reached yet."""

    settings = Libp2pSettings(relay=True)

    async def addresses(self) -> list[str]:
        return []

    async def reachability(self) -> str:
        return "direct"


@simulated(seed=0)
async def test_a_relay_tests_each_daemon_that_it_starts_and_publishes_again(
    network: SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []

    async def fail(*_: object) -> str:
        happened.append("tested")
        return "it cuts streams"

    async def restart(settings: Libp2pSettings) -> None:
        happened.append("started")

    monkeypatch.setattr(reach, "why_no_relay", fail)
    peer = network.add_peer("a")
    daemon: Any = Daemon()
    rpc, members = Rpc(peer.transport, peer.runtime, b"s" * 32), Membership(peer.peer_id, peer.runtime)
    own = reach.Reach(daemon.settings, rpc, lambda: daemon, restart, members, peer.runtime)
    await own.settle()
    settled = len(happened)
    assert happened.count("tested") == RELAY_ATTEMPTS
    published: list[int] = []
    watching = asyncio.create_task(own.watch(lambda: published.append(happened.count("started")), happened.append))
    await asyncio.sleep(SECONDS)
    watching.cancel()
    await asyncio.wait({watching})
    assert len(happened) > settled
    assert published == sorted(set(published))
    assert published[-1] == happened.count("started")
    assert set(happened) == {"tested", "started"}
    for before, after in zip(["started", *happened], [*happened, "started"], strict=True):
        assert (before, after) != ("started", "started"), "each daemon is tested"
