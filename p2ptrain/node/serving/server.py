"""A peer that serves and does not train: it needs the memory of the served weights alone."""

from __future__ import annotations

import logging
from collections import Counter

import torch

from p2ptrain.config import PeerConfig
from p2ptrain.errors import ConfigError, ResourceError
from p2ptrain.node.draining import until_over
from p2ptrain.node.peer import Peer
from p2ptrain.node.process import StopSignals
from p2ptrain.node.roles.feeding import start_view
from p2ptrain.node.serving.only import ServingOnly
from p2ptrain.pipeline.measure import available_memory
from p2ptrain.pipeline.plan import PipelinePlan, serving_bytes
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)


async def serve_only(peer: Peer, config: PeerConfig, signals: StopSignals) -> None:
    """Serve until stopped, or for ``stop_after.minutes``.

    Raises:
        ConfigError: The configured stage does not exist.
        ResourceError: No stage fits into the memory.
        P2PTrainError: As `ServingOnly`.
    """
    if config.resources.threads:
        torch.set_num_threads(config.resources.threads)
    manifest, view, stage = peer.manifest, None, 0
    if manifest.in_stages:
        view = await start_view(peer, PipelinePlan(manifest))
    needs = serving_bytes(manifest, config.serving.weights, config.serving.cache)
    memory = config.resources.max_memory or available_memory()
    fitting = [number for number, need in enumerate(needs) if need <= memory]
    if view is not None:
        if config.pipeline.stage >= len(needs):
            raise ConfigError(f"pipeline.stage = {config.pipeline.stage}: the model has {len(needs)} stages")
        fitting = [config.pipeline.stage] if config.pipeline.stage >= 0 else fitting
    if not fitting:
        raise ResourceError(f"serving needs about {min(needs) / 1e9:.1f} GB, and {memory / 1e9:.1f} GB is free")
    stage = least_served(peer, fitting)
    logger.info("serving stage %d of %d without training", stage, len(needs))
    peer.set_state("serving")
    async with Tasks() as tasks:
        served = ServingOnly(peer, config, view, stage)
        signals.wishes.join(lambda paused: peer.set_state("resting" if paused else "serving"))
        signals.wishes.join(served.pause)
        serving = tasks.call(served.run(), "serving")
        await until_over(serving, signals, config.stop_after.minutes)
        if serving.done():
            serving.result()


def least_served(peer: Peer, stages: list[int]) -> int:
    """Return one of the stages with the fewest hosts that serve them, by their records."""
    records = [held.record for held in peer.presence.book.held()]
    counted = Counter(each.serving.served.stage for each in records if each.serving and each.serving.served)
    least = min(counted[stage] for stage in stages)
    return peer.runtime.random.choice([stage for stage in stages if counted[stage] == least])
