"""Peers take a manifest from its organizer alone, whoever relays it, and read no file of theirs that it names."""

import asyncio
from pathlib import Path

import pytest

from p2ptrain.config import PeerConfig
from p2ptrain.errors import ConfigError, ManifestError
from p2ptrain.manifest import Manifest, SignedManifest
from p2ptrain.network.link import SwarmLink
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.node.meeting import serve_manifest
from p2ptrain.node.options import peer_options
from tests.support.coroutines import at_end, simulated
from tests.support.sim.product_peers import Begin, SimulatedNode


@pytest.mark.fault(47)
@pytest.mark.parametrize(("forgery", "reason"), [("proof", "is not signed by"), ("organizer", "another organizer's")])
@simulated()
async def test_a_newcomer_refuses_a_manifest_that_its_source_signed_again(
    network: SimulatedNetwork, forgery: str, reason: str, tmp_path: Path
) -> None:
    organizer, source, newcomer = (network.add_peer(name) for name in ("organizer", "source", "newcomer"))
    signed, again = (SignedManifest.create(Manifest(), peer.signer) for peer in (organizer, source))
    link = SwarmLink(signed.manifest.digest, (source.address,))
    rpc = Rpc(source.transport, source.runtime, link.digest)
    at_end(rpc.close)
    await rpc.start()
    serve_manifest(rpc, again if forgery == "organizer" else SignedManifest(signed.manifest, again.proof))
    config = PeerConfig.load(None, {"role": "trainer", "link": str(link), "run_dir": tmp_path})
    node = SimulatedNode(newcomer, peer_options(config, newcomer.peer_id), {})
    at_end(lambda: node.close(farewell=False))
    with pytest.raises(ManifestError, match=reason):
        await node._start(link, None)


@pytest.mark.fault(47)
@simulated()
async def test_a_trainer_reads_no_text_at_a_path_that_it_does_not_allow(
    network: SimulatedNetwork, begin: Begin
) -> None:
    swarm = begin(network, {"every": 4})
    swarm.start("host", 3)
    await asyncio.sleep(1.0)
    swarm.start("stranger", 3, allow_path=[swarm.folder / "host"])
    with pytest.raises(ConfigError, match=f"--allow-path {swarm.folder}/text.txt"):
        await swarm.tasks["stranger"]
    await swarm.tasks["host"]
    assert swarm.summary("host").round == 3
