"""Entry of a training peer: it restores its checkpoint, and adopts the swarm's state before its first step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from p2ptrain.averaging.grouping.membership import ACTIVE_STATES
from p2ptrain.errors import IncompatibleError
from p2ptrain.node.peer import Peer
from p2ptrain.node.presence import Presence
from p2ptrain.training.checkpoints import SavePolicy
from p2ptrain.training.checkpoints.files import load_newest_valid
from p2ptrain.training.checkpoints.saving import Saver, restore_shared
from p2ptrain.training.optimizer import SwarmOptimizer
from p2ptrain.training.state.shared_state import SharedState
from p2ptrain.training.sync.replica import Contribution
from p2ptrain.training.sync.state_server import check_agreement
from p2ptrain.training.sync.synchronizer import Synchronizer

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 20.0
PAUSE_SECONDS = 0.5
SPREADING_SECONDS = 1.0
"""Bound on the propagation of a record to all peers."""
WAITING = "waiting for a peer that holds the state"


async def start_training(
    peer: Peer,
    state: SharedState,
    wrap: Callable[[Synchronizer], SwarmOptimizer],
    directory: Path | None,
    policy: SavePolicy,
) -> tuple[SwarmOptimizer, Saver | None]:
    """Restore the newest checkpoint, adopt the best state in the swarm, then join its rounds.

    Args:
        state: With the model's initial parameters.
        wrap: Returns the optimizer that hands its work to a synchronizer.
        directory: Of this peer's checkpoints; None restores and saves nothing.

    Raises:
        CheckpointError: There are checkpoints, and none is intact.
        ConfigError: The site's policy keeps a tensor that the swarm shares.
        IncompatibleError: The other peers train a model of another shape, or use another step rule.
    """
    compute = peer.runtime.compute
    await peer.runtime.offload(peer.held.departures.joined, [entry.name for entry in state.layout.entries])
    checkpoint = await compute(load_newest_valid, directory, peer.swarm, peer.jobs) if directory is not None else None
    if checkpoint is not None:
        await compute(restore_shared, state, checkpoint)
    synchronizer = peer.held.train(state)
    optimizer = await compute(wrap, synchronizer)
    saver = Saver(directory, policy, optimizer, peer.swarm) if directory is not None else None
    if saver is not None and checkpoint is not None:
        await compute(saver.restore, checkpoint)
        logger.info("restored round %d from %s", checkpoint.head.round, checkpoint.path)
    if (reports := peer.held.departures.reports) is not None:
        peer.presence.listeners.append(reports.learn)
    peer.set_state("syncing")
    await check_agreement(peer.rpc, state, peer.membership.alive_trainers())
    await find_the_others(peer.presence, synchronizer, optimizer.work)
    if reason := why_incompatible(synchronizer):
        raise IncompatibleError(f"{reason}: build the model that the swarm's manifest describes")
    peer.set_state("training")
    await step_in(peer.presence, synchronizer)
    return optimizer, saver


def why_incompatible(synchronizer: Synchronizer) -> str:
    """Return why no trainer's state fits this model; empty if one fits, or if there is no trainer."""
    membership = synchronizer.replica.context.membership
    trainers = [record.peer for record in membership.records() if record.state in ACTIVE_STATES]
    if any(trainer not in synchronizer.catch_up.incompatible for trainer in trainers):
        return ""
    return synchronizer.catch_up.incompatible[trainers[0]] if trainers else ""


async def find_the_others(presence: Presence, synchronizer: Synchronizer, work: Contribution | None = None) -> None:
    """Follow the swarm until no trainer is ahead, or for `SETTLE_SECONDS`.

    A peer that sees no trainer looks again once its own record has propagated. So of two peers that start together, at
    least one sees the other. A peer with only a part of the swarm's state waits without a deadline: peers that are down
    may hold the state in their checkpoints.
    """
    loop, membership = asyncio.get_running_loop(), synchronizer.replica.context.membership
    deadline = loop.time() + SETTLE_SECONDS
    was_alone = False
    while loop.time() < deadline or synchronizer.catch_up.has_partial_state():
        if synchronizer.catch_up.has_partial_state() and not membership.alive_trainers():
            await _wait_for_a_source(synchronizer)
            deadline = loop.time() + SETTLE_SECONDS
            continue
        if not presence.directory_answers:  # It is unknown whether other peers are there.
            await asyncio.sleep(PAUSE_SECONDS)
            continue
        followed = await synchronizer.follow_swarm(work)
        trainers = [record for record in membership.records() if record.state in ACTIVE_STATES]
        if not trainers and not was_alone:
            was_alone = True
            await presence.publish()
            await asyncio.sleep(SPREADING_SECONDS)
            await presence.refresh()
            continue
        # A peer that stays a few rounds behind catches up once the other peers wait for it.
        is_behind = any(record.round > synchronizer.head.round for record in trainers)
        if followed or not is_behind or why_incompatible(synchronizer):
            return
        await asyncio.sleep(PAUSE_SECONDS)


async def _wait_for_a_source(synchronizer: Synchronizer) -> None:
    """Wait until a trainer is there; `Presence` updates the membership meanwhile."""
    logger.warning(
        "no peer that holds the swarm's state is there, and only a part of it is here: waiting until one is back"
        " (to begin anew without it, start in an empty run directory)"
    )
    with synchronizer.jobs(WAITING, ""):
        while not synchronizer.replica.context.membership.alive_trainers():  # noqa: ASYNC110
            await asyncio.sleep(PAUSE_SECONDS)


async def step_in(presence: Presence, synchronizer: Synchronizer) -> None:
    """Announce that this peer trains: by record, and directly to starting peers, so that two do not train alone."""
    await presence.publish()
    await synchronizer.averager.matchmaker.announce()
