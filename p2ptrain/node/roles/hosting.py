"""The hosting side of a pipeline's peer: it chooses a stage, hosts it, and moves if another needs it more."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from p2ptrain.config import PeerConfig
from p2ptrain.errors import ConfigError, P2PTrainError, ResourceError
from p2ptrain.network.records.record import StageReport
from p2ptrain.node.peer import Peer
from p2ptrain.node.roles.materials import choose_device
from p2ptrain.node.roles.stage_saving import save_and_tell
from p2ptrain.node.roles.stages import Stages
from p2ptrain.pipeline.measure import available_memory, measure_speed
from p2ptrain.pipeline.migration import StageMigrator
from p2ptrain.pipeline.placement import Choice, choose
from p2ptrain.pipeline.view import DECIDED_STATE, PipelineView

logger = logging.getLogger(__name__)

LINGER_SECONDS = 20.0
"""After the last round, hosts serve trainers that evaluate the result, at most this long."""
MAX_CHOICES = 6
CHOICE_SECONDS = 1.5
"""Time for other newcomers to see a newcomer's choice of a stage; longer than a record takes to reach all peers."""
QUIET_SECONDS = 4.0
"""Idle time after which a host takes the evaluation to be done; < `LINGER_SECONDS`."""


class Hosting:
    """One peer's part as a host; make it with `start`. ``migrator.stop`` ends `run`."""

    def __init__(self, peer: Peer, config: PeerConfig, stages: Stages, migrator: StageMigrator) -> None:
        self._peer = peer
        self._config = config
        self._stages = stages
        self.migrator = migrator

    @classmethod
    async def start(cls, peer: Peer, config: PeerConfig, view: PipelineView) -> Hosting:
        """Choose a stage and take it on."""
        memory = config.resources.max_memory or available_memory()
        choice = await _choose_stage(peer, config, view, memory)
        logger.info("hosting %s as stage %d: %s", view.plan.spans[choice.stage], choice.stage, choice.reason)
        stages = Stages(peer, config, view)
        hosted = await stages.take_on(choice.stage)
        may_move = config.pipeline.stage < 0
        migrator = StageMigrator(view, peer.presence, peer.rpc, hosted, stages, memory if may_move else 0)
        peer.record.parts.append(lambda record: replace(record, next_stage=migrator.next_stage))
        return cls(peer, config, stages, migrator)

    async def step_in(self) -> None:
        """Join the stage's rounds and accept microbatches, and announce it to the other peers."""
        await self._stages.step_in(self.migrator.hosted)

    def pause(self, paused: bool) -> None:
        """Refuse microbatches while paused; those in flight complete, and the stage follows its rounds."""
        self.migrator.hosted.host.is_resting = paused

    async def run(self) -> None:
        """Host until stopped, or until the last round is saved and evaluated."""
        await self.migrator.run()
        await self.save()
        hosted = self.migrator.hosted
        if not hosted.rounds.is_done:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LINGER_SECONDS
        left = QUIET_SECONDS
        while left > 0:
            await asyncio.sleep(left)
            quiet = QUIET_SECONDS - hosted.host.seconds_idle
            # Hosts still exchange reports of their last checkpoints.
            left = min(deadline - loop.time(), max(quiet, 1.0 if hosted.saves.missing() else 0.0))
        if missing := hosted.saves.missing():
            logger.warning("the last checkpoint is not complete: %s", missing)

    async def save(self) -> P2PTrainError | None:
        """Save the last state, unless it is saved; return the error, if any."""
        return await save_and_tell(self._peer, self._config, self.migrator.hosted, is_last=True)


async def _choose_stage(peer: Peer, config: PeerConfig, view: PipelineView, memory: int) -> Choice:
    """Return the configured stage, or the stage that needs this peer most."""
    plan = view.plan
    if config.pipeline.stage >= plan.num_stages:
        raise ConfigError(f"pipeline.stage = {config.pipeline.stage}: the stages are 0 to {plan.num_stages - 1}")
    if config.pipeline.stage >= 0:
        need = plan.needs[config.pipeline.stage].memory
        if config.resources.max_memory and need > memory:  # Without a limit, the owner's choice of a stage counts.
            raise ResourceError(
                f"stage {config.pipeline.stage} takes about {need / 1e9:.1f} GB, and the limit is {memory / 1e9:.1f}"
                " GB: raise --max-memory, or let the peer choose a stage"
            )
        peer.set_state(DECIDED_STATE)
        return Choice(config.pipeline.stage, "asked for")
    speed, choice = await _speed(peer, config, view), Choice(-1, "")
    for _ in range(MAX_CHOICES):
        before = choice
        choice = choose(plan.needs, view.hosts(), speed, memory)
        if choice.stage == before.stage:
            break
        # Other newcomers have to see this choice, and this peer theirs.
        peer.held.intended = (StageReport(choice.stage, 0, bytes(32), bytes(32), 0),)
        await peer.presence.publish()
        await asyncio.sleep(CHOICE_SECONDS * peer.runtime.random.uniform(1.0, 1.5))
        await peer.presence.refresh()
    peer.record.state = DECIDED_STATE
    await peer.presence.publish()
    return choice


async def _speed(peer: Peer, config: PeerConfig, view: PipelineView) -> float:
    """Return this machine's speed in the hosts' unit; the hosts' median if none was measured yet."""
    others = view.medium_speed()
    if not view.is_measured:
        return others
    with peer.jobs("measuring this machine", ""):
        device, bandwidth = choose_device(config), config.resources.up
        speed = await peer.runtime.on_device(measure_speed, view.plan, device, bandwidth)
    if speed:
        logger.info("this machine is about %.2g times as fast as a host of medium speed", speed / others)
    return speed or others
