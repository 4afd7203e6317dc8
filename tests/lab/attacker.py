"""A stranger of a real run: ``python -m tests.lab.attacker OPTIONS``, a JSON object; it attacks until it is killed."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import torch

from p2ptrain.network.identity import Identity
from p2ptrain.network.libp2p.settings import Libp2pSettings
from p2ptrain.network.link import SwarmLink
from p2ptrain.node.options import PeerOptions
from p2ptrain.node.peer import Peer
from p2ptrain.runtime import real_runtime
from p2ptrain.training.state.initial_state import initial_state
from p2ptrain.training.state.shared_state import SharedState
from tests.lab.stranger import Stranger
from tests.support.processes.worker import make_model, say


def attacker_of(peer: Peer, name: str, hidden: int) -> dict[str, Any]:
    """Return the arguments of a `Stranger` on a real peer."""

    def new_state() -> SharedState:
        return initial_state(make_model(hidden), None, peer.manifest, peer.swarm)

    network = peer.network
    return {
        "name": name, "rpc": peer.rpc, "transport": network.transport, "directory": network.directory,
        "signer": peer.identity, "manifest": peer.manifest, "new_signer": Identity.ephemeral, "new_state": new_state,
    }  # fmt: skip


async def main(name: str, link: str, attack: str, options: dict[str, Any], hidden: int) -> None:
    runtime, network = real_runtime("stranger"), Libp2pSettings(listen=("/ip4/0.0.0.0/tcp/0",))
    with Identity.ephemeral() as identity:
        # A client publishes no record of its own: that is the attack's to do.
        peer_options = PeerOptions("client", name, "cpu", None, network)
        peer = await Peer.start(identity, peer_options, runtime, link=SwarmLink.parse(link))

        stranger = Stranger(**attacker_of(peer, name, hidden))
        say("joined", peer=identity.peer_id, daemon=peer.network.transport.daemon.process_id)  # type: ignore[attr-defined]
        await stranger.run(attack, options)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(**json.loads(sys.argv[1])))
