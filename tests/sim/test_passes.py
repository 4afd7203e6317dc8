"""A seed lets in few peers of each network, and those that stay keep their places."""

import asyncio

import pytest

from p2ptrain.errors import NotAdmittedError
from p2ptrain.manifest import ISSUER_FILE, AdmissionSpec
from p2ptrain.network import issuing
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.network.simulated.transport import SimulatedTransport
from p2ptrain.node import meeting
from p2ptrain.signing import seeds_issuing_key
from tests.support.coroutines import simulated
from tests.support.signers import NamedSigner
from tests.support.sim.product_peers import Begin, ProductSwarm

PASS_SECONDS = 20
NETWORKS = {"a": "192.0.2.1", "b": "192.0.2.2", "c": "192.0.2.3", "far": "198.51.100.1"}


def start_seed(swarm: ProductSwarm) -> None:
    folder = swarm.folder / "seed"
    folder.mkdir(exist_ok=True)
    (folder / ISSUER_FILE).write_bytes(seeds_issuing_key(NamedSigner("organizer")).private_bytes_raw())
    swarm.start("seed", role="bootstrap")


@pytest.mark.fault(37)
@simulated(seed=4)
async def test_a_third_peer_of_a_network_waits_until_one_has_left(
    network: SimulatedNetwork, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(issuing, "PASS_SECONDS", PASS_SECONDS)
    monkeypatch.setattr(meeting, "RENEW_SECONDS", 1.0)

    async def hosts_of(transport: SimulatedTransport, peer: str) -> list[str]:
        return [NETWORKS[each.name] for each in network.alive if each.peer_id == peer]

    monkeypatch.setattr(SimulatedTransport, "hosts_of", hosts_of)
    swarm = begin(network, {"every": 2}, admission=AdmissionSpec(mode="open", puzzle_bits=2, peers_per_network=2))
    start_seed(swarm)
    await swarm.until(lambda: "seed" in swarm.nodes)
    swarm.start_all(("a", "b", "far"))
    await swarm.until(lambda: all(swarm.round(name) > 0 for name in ("a", "b", "far")))
    swarm.start("c")
    with pytest.raises(NotAdmittedError, match=r"2 places of its network 192\.0\.2\.0/24 are taken at its seed"):
        await swarm.tasks.pop("c")
    await asyncio.sleep(2 * PASS_SECONDS)
    assert not any(swarm.tasks[name].done() for name in ("a", "b", "far"))  # They asked again in time.
    await swarm.drain("b")
    swarm.tasks.pop("b")
    await asyncio.sleep(PASS_SECONDS)
    before = swarm.sync("a").head.round
    swarm.start("c")
    await swarm.until(lambda: "c" in swarm.nodes and swarm.nodes["c"].held.synchronizer is not None)
    await swarm.until(lambda: swarm.nodes["c"].rpc.peer_id in swarm.sync("a").head.members)
    assert swarm.sync("a").head.round > before
    for name in ("a", "c", "far", "seed"):
        swarm.stop(name)
    await swarm.end()
