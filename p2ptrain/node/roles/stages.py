"""The stages that a peer hosts: built with their state, saved and published after each round."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from p2ptrain.config import PeerConfig
from p2ptrain.errors import IncompatibleError
from p2ptrain.node.peer import Peer
from p2ptrain.node.roles.stage_saving import restore_stage, save_and_tell
from p2ptrain.node.roles.training import find_the_others, step_in
from p2ptrain.pipeline.plan import PipelinePlan
from p2ptrain.pipeline.view import PipelineView
from p2ptrain.tasks import Tasks, together

if TYPE_CHECKING:
    from p2ptrain.pipeline.stage.hosted_stage import HostedStage
    from p2ptrain.training.sync.synchronizer import RoundResult

logger = logging.getLogger(__name__)

WRITING_SECONDS = 10.0
"""Timeout of a checkpoint that is being written when the peer closes."""


class Stages:
    """Builds and publishes the stages of a peer; see `p2ptrain.pipeline.migration.Stages`."""

    def __init__(self, peer: Peer, config: PeerConfig, view: PipelineView) -> None:
        self._peer = peer
        self._config = config
        self._view = view
        self._saves = Tasks()
        peer.on_close(lambda: self._saves.close(WRITING_SECONDS))

    async def take_on(self, number: int) -> HostedStage:
        """Return a stage with its state, from other hosts or from this machine's last checkpoint."""
        peer, config, view = self._peer, self._config, self._view
        from p2ptrain.pipeline.stage.compute import StageCompute
        from p2ptrain.pipeline.stage.device import Device
        from p2ptrain.pipeline.stage.hosted_stage import HostedStage
        from p2ptrain.pipeline.stage.units import HostingOptions
        from p2ptrain.pipeline.stage.worker import StageWorker

        stage = await asyncio.to_thread(_build, peer, config, view.plan, number)
        worker = StageWorker(view.plan, number, StageCompute(stage), Device(peer.runtime))
        options = HostingOptions(peer.options.upload_bandwidth, peer.jobs)
        rounds = _Rounds(peer, config, self._saves)
        hosted = HostedStage(view, worker, peer.rpc, peer.identity, rounds, options)
        try:
            for save in await peer.runtime.compute(restore_stage, config, hosted):
                hosted.saves.note(save)
            peer.host(hosted)
            for unit in hosted.units:
                await find_the_others(peer.presence, unit.membership, unit.synchronizer, unit.work)
                if reasons := list(unit.synchronizer.catch_up.incompatible.values()):
                    raise IncompatibleError(f"{reasons[0]}: build the model that the manifest describes")
        except BaseException:
            await self.give_up(hosted)
            raise
        hosted.rounds.last_round = last_round(peer, config, hosted.units[0].round)
        return hosted

    async def step_in(self, hosted: HostedStage) -> None:
        """Join the stage's rounds and accept microbatches, and announce it to the other peers."""
        hosted.participate()
        await together("step-in", (step_in(self._peer.presence, unit.synchronizer) for unit in hosted.units))

    async def give_up(self, hosted: HostedStage) -> None:
        """Close a stage that this peer does not host after all, and remove it from the record."""
        peer = self._peer
        peer.hosted = [other for other in peer.hosted if other is not hosted]
        if peer.hosted:
            peer.synchronizer = peer.hosted[-1].units[0].synchronizer
        peer.presence.changed()
        await hosted.close()

    def moved(self, hosted: HostedStage) -> None:
        """Publish the stage that this peer has moved to."""
        self._peer.hosted = [hosted]
        self._peer.synchronizer = hosted.units[0].synchronizer
        self._peer.presence.changed()


def last_round(peer: Peer, config: PeerConfig, now: int) -> int:
    """Return the round at which this peer leaves; 0 for never."""
    stop = config.stop_after
    limits = [stop.at_round, peer.manifest.training.rounds, now + stop.rounds if stop.rounds else 0]
    return min(filter(None, limits), default=0)


def _build(peer: Peer, config: PeerConfig, plan: PipelinePlan, stage: int) -> Any:
    from p2ptrain.models.pretrained import weights_folder
    from p2ptrain.node.roles.trainer import choose_device

    weights = weights_folder(peer.manifest.model, plan.spans[stage], config.weights, peer.jobs)
    return plan.build(stage, weights, peer.jobs).to(choose_device(config))


class _Rounds:
    """A host's work after each round: log, save, publish.

    `Stages` owns the saves in progress, since they may outlive a stage.
    """

    def __init__(self, peer: Peer, config: PeerConfig, saves: Tasks) -> None:
        from p2ptrain.training.metrics import MetricsWriter

        self._peer = peer
        self._config = config
        self._metrics = MetricsWriter(config.run_dir / "metrics.jsonl")
        self._saves = saves
        self._saving: asyncio.Task[None] | None = None

    def round_ended(self, hosted: HostedStage, result: RoundResult) -> None:
        """See `StageObserver.round_ended`."""
        head = hosted.units[0].synchronizer.head
        if result.committed:
            logger.info(
                "round %d of stage %d: %d of %d hosts contributed, %.1f s%s", result.round, hosted.number,
                result.contributors, result.members, result.seconds, f" ({result.reason})" if result.reason else "",
            )  # fmt: skip
        else:
            logger.warning("round %d of stage %d was not committed: %s", result.round, hosted.number, result.reason)
        self._metrics.write(
            "round", round=result.round, committed=result.committed, reason=result.reason, seconds=result.seconds,
            matchmaking_seconds=result.matchmaking_seconds, transfer_seconds=result.transfer_seconds,
            members=result.members, contributors=result.contributors, loss=None, digest=head.digest.hex(),
            tokens=hosted.units[0].synchronizer.replica.trained_tokens, stage=hosted.number,
        )  # fmt: skip
        self._peer.presence.changed()

    def round_began(self, hosted: HostedStage, round: int) -> None:
        """Save if a checkpoint is due. All hosts save at the same rounds, so that their checkpoints match.

        `p2ptrain.node.roles.pipeline` saves after the last round.
        """
        every = self._config.checkpoints.every_rounds
        is_idle = self._saving is None or self._saving.done()
        if is_idle and every > 0 and round % every == 0 and not hosted.rounds.is_done:
            saving = save_and_tell(self._peer, self._config, hosted)
            self._saving = self._saves.start(saving, "save")
