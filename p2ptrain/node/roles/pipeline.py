"""A peer of a swarm whose model is cut into stages: it hosts a stage, sends microbatches, or both."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import torch

from p2ptrain.config import PeerConfig
from p2ptrain.node.draining import RESCUE, Drain, unless_stopped, until_over
from p2ptrain.node.peer import Peer
from p2ptrain.node.process import StopSignals
from p2ptrain.node.reports.summary import write_summary
from p2ptrain.node.roles.feeding import start_feeding, start_view
from p2ptrain.node.roles.hosting import Hosting
from p2ptrain.pipeline.client.trainer import PipelineTrainer
from p2ptrain.pipeline.plan import PipelinePlan
from p2ptrain.tasks import Tasks, together
from p2ptrain.training.loop import TrainingProgress


async def take_part(peer: Peer, config: PeerConfig, signals: StopSignals) -> None:
    """Host, send, or both, until stopped, until the last round, or for ``stop_after.minutes``; then drain.

    Raises:
        ManifestError: The model cannot be cut as the manifest says.
        ResourceError: No stage fits into this machine.
        ConfigError: The configured stage does not exist, or the text cannot be read.
        TemporaryError: Microbatches keep failing.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    if config.resources.threads:
        torch.set_num_threads(config.resources.threads)
    if config.serving.enabled:
        await peer.runtime.on_device(peer.runtime.yield_to_serving)
    plan = PipelinePlan(peer.manifest)
    await asyncio.to_thread(lambda: plan.needs)  # The search for adapters in the model is slow.
    parties = await unless_stopped(_start(peer, config, plan), signals)
    if parties is None:
        return  # Its initial state is on disk.
    hosting, feeding = parties
    peer.set_state("training")
    parts: list[Coroutine[Any, Any, None]] = []
    if hosting is not None:
        await hosting.step_in()
        parts.append(hosting.run())
    if feeding is not None:
        parts.append(feeding.run())
    signals.wishes.join(lambda paused: peer.set_state("resting" if paused else "training"))
    if hosting is not None:
        signals.wishes.join(hosting.pause, lambda: hosting.migrator.hosted.rounds.finish())
    if feeding is not None:
        signals.wishes.join(feeding.pause, feeding.finish)
    async with Tasks() as tasks:
        if config.serving.enabled and hosting is not None:
            from p2ptrain.node.serving.hosting import Serving

            served = Serving(peer, config)
            signals.wishes.join(served.pause)
            tasks.keep(served.run, "serving")
        working = tasks.call(together("part", parts), "pipeline")
        reason = await until_over(working, signals, config.stop_after.minutes)
        drain = Drain(config.drain_seconds)
        if feeding is not None:
            feeding.stopping.set()
        if hosting is not None:
            hosting.migrator.stop()
        await asyncio.wait({working}, timeout=drain.left(RESCUE))
    error = None if working.cancelled() else working.exception()
    if hosting is not None:
        unsaved = await hosting.save()
        error = error or unsaved
    progress, rounds = (feeding.progress, feeding.rounds) if feeding is not None else (TrainingProgress(), 0)
    write_summary(peer, config, progress, loop.time() - started, reason, rounds)
    if error is not None:
        raise error


async def _start(peer: Peer, config: PeerConfig, plan: PipelinePlan) -> tuple[Hosting | None, PipelineTrainer | None]:
    view = await start_view(peer, plan)
    hosting = await Hosting.start(peer, config, view) if config.role != "trainer" else None
    feeding = await start_feeding(peer, config, view) if config.role != "stage" else None
    return hosting, feeding
