"""What every training peer does before its first step: take on the swarm's state."""

from __future__ import annotations

import asyncio

from p2ptrain.errors import IncompatibleError
from p2ptrain.node.peer import Peer

SETTLE_SECONDS = 20.0
PAUSE_SECONDS = 0.5


async def enter_training(peer: Peer) -> None:
    """Take on the best state that the swarm has, then let the others wait for this peer.

    Raises:
        IncompatibleError: The other peers train a model of another shape.
    """
    synchronizer = peer.synchronizer
    assert synchronizer is not None
    peer.set_state("syncing")
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE_SECONDS
    while loop.time() < deadline:
        await peer.presence.refresh()
        await synchronizer.follow_swarm(None)
        ahead = [r for r in peer.membership.records() if r.state == "training" and r.round > synchronizer.head.round]
        if not ahead:
            break
        await asyncio.sleep(PAUSE_SECONDS)
    trainers = [record.peer for record in peer.membership.records() if record.state == "training"]
    if trainers and all(trainer in synchronizer.incompatible for trainer in trainers):
        reason = synchronizer.incompatible[trainers[0]]
        raise IncompatibleError(f"{reason}: build the model that the swarm's manifest describes")
    peer.set_state("training")
    await peer.presence.publish()
    peer.remember_peers()  # Also for the start after a crash, which leaves no time for it.
