"""The stages that a peer hosts: built with their state, and published."""

from __future__ import annotations

from p2ptrain.config import PeerConfig
from p2ptrain.errors import IncompatibleError
from p2ptrain.node.peer import Peer
from p2ptrain.node.roles.materials import build_worker, last_round
from p2ptrain.node.roles.stage_saving import RoundKeeper, restore_stage
from p2ptrain.node.roles.training import find_the_others, step_in
from p2ptrain.pipeline.stage.hosted_stage import HostedStage
from p2ptrain.pipeline.stage.units import HostingOptions
from p2ptrain.pipeline.view import PipelineView
from p2ptrain.tasks import Tasks, together

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
        peer.on_close(peer.held.close)

    async def take_on(self, number: int) -> HostedStage:
        """Return a stage with its state, from other hosts or from this machine's last checkpoint."""
        peer, config, view = self._peer, self._config, self._view
        worker = await build_worker(peer, config, view.plan, number)
        options = HostingOptions(peer.options.upload_bandwidth, peer.jobs, owner=peer)
        rounds = RoundKeeper(peer, config, self._saves)
        hosted = HostedStage(view, worker, peer.rpc, peer.identity, rounds, options)
        try:
            for save in await peer.runtime.compute(restore_stage, config, hosted):
                hosted.saves.note(save)
            peer.held.host(hosted)
            for unit in hosted.units:
                await find_the_others(peer.presence, unit.synchronizer, unit.work)
                if reasons := list(unit.synchronizer.catch_up.incompatible.values()):
                    raise IncompatibleError(f"{reasons[0]}: build the model that the manifest describes")
        except BaseException:
            await self.give_up(hosted)
            raise
        hosted.rounds.last_round = last_round(peer, config, hosted.units[0].state.head.round)
        return hosted

    async def step_in(self, hosted: HostedStage) -> None:
        hosted.participate()
        await together("step-in", (step_in(self._peer.presence, unit.synchronizer) for unit in hosted.units))

    async def give_up(self, hosted: HostedStage) -> None:
        held = self._peer.held
        held.stages = [other for other in held.stages if other is not hosted]
        self._peer.presence.changed()
        await hosted.close()

    def moved(self, hosted: HostedStage) -> None:
        self._peer.held.stages = [hosted]
        self._peer.presence.changed()
