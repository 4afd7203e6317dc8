"""What every training peer does before its first step: take on the swarm's state."""

from __future__ import annotations

import asyncio
import logging

from p2ptrain.averaging.membership import ACTIVE_STATES, Membership
from p2ptrain.errors import IncompatibleError
from p2ptrain.node.peer import Peer
from p2ptrain.node.presence import Presence
from p2ptrain.training.sync import Synchronizer
from p2ptrain.training.work import Work

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 20.0
PAUSE_SECONDS = 0.5
SPREADING_SECONDS = 1.0
"""How long a record may take to be seen by everybody."""
WAITING = "waiting for a peer that holds the state"


async def enter_training(peer: Peer, work: Work | None = None) -> None:
    """Take on the best state that the swarm has, then let the others wait for this peer.

    Args:
        peer: It has a synchronizer.
        work: The live model, which follows the state; None if nothing is to follow it.

    Raises:
        IncompatibleError: The other peers train a model of another shape, or step by another rule.
    """
    synchronizer = peer.synchronizer
    assert synchronizer is not None
    peer.set_state("syncing")
    await peer.presence.refresh()
    await synchronizer.check_agreement()
    await find_the_others(peer.presence, peer.membership, synchronizer, work)
    if reason := why_incompatible(peer.membership, synchronizer):
        raise IncompatibleError(f"{reason}: build the model that the swarm's manifest describes")
    peer.set_state("training")
    await step_in(peer.presence, synchronizer)


def why_incompatible(membership: Membership, synchronizer: Synchronizer) -> str:
    """Why no peer that trains has a state that fits this model; empty when one has, or nobody trains."""
    trainers = [record.peer for record in membership.records() if record.state in ACTIVE_STATES]
    if any(trainer not in synchronizer.incompatible for trainer in trainers):
        return ""
    return synchronizer.incompatible[trainers[0]] if trainers else ""


async def find_the_others(
    presence: Presence, membership: Membership, synchronizer: Synchronizer, work: Work | None = None
) -> None:
    """Follow the swarm until no trainer is ahead, or for `SETTLE_SECONDS`.

    A peer that sees nobody train looks again once its own record has spread: of two peers that start together at least
    one then knows the other. A peer with nothing but a part of the swarm's state waits without a deadline: the state
    lives on in checkpoints of peers that are down.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SETTLE_SECONDS
    was_alone = False
    while loop.time() < deadline or synchronizer.lacks_a_state():
        answers = await presence.refresh()
        if synchronizer.lacks_a_state() and not membership.alive_trainers():
            await _wait_for_a_source(membership, synchronizer)
            deadline = loop.time() + SETTLE_SECONDS
            continue
        if not answers:  # That nobody could be asked does not mean that nobody is there.
            await asyncio.sleep(PAUSE_SECONDS)
            continue
        followed = await synchronizer.follow_swarm(work)
        trainers = [record for record in membership.records() if record.state in ACTIVE_STATES]
        if not trainers and not was_alone:
            was_alone = True
            await presence.publish()
            await asyncio.sleep(SPREADING_SECONDS)
            continue
        # Who is some rounds behind catches up for good when the others begin to wait for it.
        is_behind = any(record.round > synchronizer.head.round for record in trainers)
        if followed or not is_behind or why_incompatible(membership, synchronizer):
            return
        await asyncio.sleep(PAUSE_SECONDS)


async def _wait_for_a_source(membership: Membership, synchronizer: Synchronizer) -> None:
    """Wait until a peer is there that trains; its records come in meanwhile."""
    logger.warning(
        "no peer that holds the swarm's state is there, and only a part of it is here: waiting until one is back"
        " (to begin anew without it, start in an empty run directory)"
    )
    with synchronizer.jobs(WAITING, ""):
        while not membership.alive_trainers():  # noqa: ASYNC110
            await asyncio.sleep(PAUSE_SECONDS)


async def step_in(presence: Presence, synchronizer: Synchronizer) -> None:
    """Tell everybody that this peer trains now, those that are about to train in person, lest both train alone."""
    await presence.publish()
    await presence.refresh()
    await synchronizer.announce()
