"""A peer of a swarm whose model is cut into stages: it hosts a stage, sends microbatches, or both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from p2ptrain.config import PeerConfig
from p2ptrain.errors import ConfigError, ResourceError
from p2ptrain.network.records.record import StageReport
from p2ptrain.node.draining import RESCUE, Drain, unless_stopped
from p2ptrain.node.peer import EMPTY_HASH, Pace, Peer
from p2ptrain.node.roles.stage_saving import save_and_tell
from p2ptrain.node.roles.stages import Stages, last_round
from p2ptrain.node.signals import StopSignals
from p2ptrain.node.summary import write_summary
from p2ptrain.pipeline.placement import Choice, choose
from p2ptrain.pipeline.plan import PipelinePlan
from p2ptrain.pipeline.view import DECIDED_STATE, PipelineView
from p2ptrain.tasks import Tasks, together

if TYPE_CHECKING:
    from p2ptrain.pipeline.client.sender import MicrobatchSender
    from p2ptrain.pipeline.client.trainer import PipelineTrainer
    from p2ptrain.pipeline.migration import StageMigrator
    from p2ptrain.pipeline.stage.hosted_stage import HostedStage
    from p2ptrain.training.loop import TrainingProgress

logger = logging.getLogger(__name__)

LINGER_SECONDS = 20.0
"""After the last round, hosts serve trainers that evaluate the result, at most this long."""
MAX_CHOICES = 6
SPREADING_SECONDS = 1.5
"""Bound on the propagation of a record to all peers."""
QUIET_SECONDS = 4.0
"""Idle time after which a host takes the evaluation to be done; < `LINGER_SECONDS`."""


async def take_part(peer: Peer, config: PeerConfig, signals: StopSignals) -> None:
    """Host, send, or both, until stopped, until the last round, or for ``stop_after.minutes``; then drain.

    Raises:
        ManifestError: The model cannot be cut as the manifest says.
        ResourceError: No stage fits into this machine.
        ConfigError: The configured stage does not exist, or the text cannot be read.
        TemporaryError: Microbatches keep failing.
    """
    from p2ptrain.training.loop import TrainingProgress

    loop = asyncio.get_running_loop()
    started = loop.time()
    if config.resources.threads:
        import torch

        torch.set_num_threads(config.resources.threads)
    plan = PipelinePlan(peer.manifest)
    await asyncio.to_thread(lambda: plan.needs)  # The search for adapters in the model is slow.
    view = PipelineView(plan, peer.identity.peer_id, peer.runtime)
    peer.presence.listeners.append(view.update)
    peer.activity = replace(peer.activity, failovers=lambda: view.failovers)
    await peer.presence.refresh()
    parties = await unless_stopped(_start(peer, config, view), signals)
    if parties is None:
        return  # Its initial state is on disk.
    migrator, feeding = parties
    peer.set_state("training")
    if migrator is not None:
        await Stages(peer, config, view).step_in(migrator.hosted)
    parts: list[Coroutine[Any, Any, None]] = []
    if migrator is not None:
        parts.append(_host(migrator, lambda hosted: save_and_tell(peer, config, hosted, is_last=True)))
    if feeding is not None:
        parts.append(feeding.run())
    async with Tasks() as tasks:
        working = tasks.call(together("part", parts), "pipeline")
        wanted = tasks.call(signals.requested.wait(), "stop")
        timeout = config.stop_after.minutes * 60 if config.stop_after.minutes else None
        await asyncio.wait({working, wanted}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        drain = Drain(config.drain_seconds)
        reason = signals.reason or ("rounds" if working.done() else "minutes")
        if feeding is not None:
            feeding.stop()
        if migrator is not None:
            migrator.stop()
        await asyncio.wait({working}, timeout=drain.left(RESCUE))
    error = None if working.cancelled() else working.exception()
    hosted = migrator.hosted if migrator is not None else None
    if hosted is not None:
        unsaved = await save_and_tell(peer, config, hosted, is_last=True)
        error = error or unsaved
    progress, rounds = (feeding.progress, feeding.rounds) if feeding is not None else (TrainingProgress(), 0)
    write_summary(peer, config, progress, loop.time() - started, reason, rounds)
    peer.remember_peers()
    if error is not None:
        raise error


async def _start(
    peer: Peer, config: PeerConfig, view: PipelineView
) -> tuple[StageMigrator | None, PipelineTrainer | None]:
    migrator = await _start_hosting(peer, config, view) if config.role != "trainer" else None
    feeding = await _start_feeding(peer, config, view) if config.role != "stage" else None
    return migrator, feeding


# Hosting


async def _start_hosting(peer: Peer, config: PeerConfig, view: PipelineView) -> StageMigrator:
    from p2ptrain.pipeline.measure import available_memory
    from p2ptrain.pipeline.migration import StageMigrator

    memory = config.resources.max_memory or available_memory()
    choice = await _choose_stage(peer, config, view, memory)
    logger.info("hosting %s as stage %d: %s", view.plan.spans[choice.stage], choice.stage, choice.reason)
    stages = Stages(peer, config, view)
    hosted = await stages.take_on(choice.stage)
    may_move = config.pipeline.stage < 0
    migrator = StageMigrator(view, peer.presence, peer.rpc, hosted, stages, memory if may_move else 0)
    peer.activity = replace(peer.activity, next_stage=lambda: migrator.next_stage)
    return migrator


async def _choose_stage(peer: Peer, config: PeerConfig, view: PipelineView, memory: int) -> Choice:
    """Return the configured stage, or the stage that needs this peer most.

    Raises:
        ConfigError: The configured stage does not exist.
        ResourceError: No stage fits.
    """
    plan = view.plan
    if config.pipeline.stage >= plan.num_stages:
        raise ConfigError(
            f"pipeline.stage = {config.pipeline.stage}: this swarm has the stages 0 to {plan.num_stages - 1}"
        )
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
        peer.intended = (StageReport(choice.stage, 0, EMPTY_HASH, EMPTY_HASH, 0),)
        await peer.presence.publish()
        await asyncio.sleep(SPREADING_SECONDS * peer.runtime.random.uniform(1.0, 1.5))
        await peer.presence.refresh()
    peer.status.state = DECIDED_STATE
    await peer.presence.publish()
    return choice


async def _speed(peer: Peer, config: PeerConfig, view: PipelineView) -> float:
    """Return this machine's speed in the hosts' unit; the hosts' median if none was measured yet."""
    from p2ptrain.node.roles.trainer import choose_device
    from p2ptrain.pipeline.measure import measure_speed

    others = view.medium_speed()
    if not view.is_measured:
        return others
    with peer.jobs("measuring this machine", ""):
        device, bandwidth = choose_device(config), config.resources.up
        speed = await peer.runtime.on_device(measure_speed, view.plan, device, bandwidth)
    if speed:
        logger.info("this machine is about %.2g times as fast as a host of medium speed", speed / others)
    return speed or others


async def _host(migrator: StageMigrator, save: Callable[[HostedStage], Awaitable[object]]) -> None:
    await migrator.run()
    hosted = migrator.hosted
    await save(hosted)
    if hosted.rounds.is_done:  # Trainers may evaluate the result.
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


# Sending


async def start_sender(peer: Peer, view: PipelineView) -> MicrobatchSender:
    """Return a started sender of microbatches; `Peer.close` closes it."""
    from p2ptrain.pipeline.client.sender import MicrobatchSender

    # Hosts may still know microbatch numbers of this peer's previous process.
    sender = MicrobatchSender(view.new_caller(peer.rpc), int(peer.runtime.now() * 1000))
    await sender.start()
    peer.on_close(sender.close)
    return sender


async def _start_feeding(peer: Peer, config: PeerConfig, view: PipelineView) -> PipelineTrainer:
    from p2ptrain.models import check_reads_text
    from p2ptrain.models.pretrained import local_data
    from p2ptrain.pipeline.client.trainer import PipelineTrainer, SendingOptions
    from p2ptrain.training.data.corpus import load_corpus
    from p2ptrain.training.metrics import MetricsWriter

    manifest, model = peer.manifest, peer.manifest.model
    check_reads_text(model)
    data, cache = local_data(manifest, config.weights), config.run_dir.parent / "data"
    corpus = await asyncio.to_thread(load_corpus, data, model.context, model.vocabulary, cache, peer.jobs)

    def publish(progress: TrainingProgress) -> None:
        peer.status.note = progress.note
        peer.presence.changed()

    options = SendingOptions(config.pipeline.credits, config.run_dir, lambda now: last_round(peer, config, now))
    metrics, sender = MetricsWriter(config.run_dir / "metrics.jsonl"), await start_sender(peer, view)
    trainer = PipelineTrainer(sender, manifest, corpus, metrics, options, publish)
    progress = trainer.progress
    peer.activity = replace(peer.activity, pace=lambda: Pace(progress.loss, progress.tokens_per_second, 0))
    return trainer
