"""Construction of a trainer of the manifest's own model: data, model, state, checkpoint, optimizer."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.config import PeerConfig
from p2ptrain.errors import ResourceError
from p2ptrain.node.peer import Pace, Peer
from p2ptrain.node.roles.training import enter_training

if TYPE_CHECKING:
    import torch

    from p2ptrain.training.bridge import Bridge
    from p2ptrain.training.checkpoints.saving import Saver
    from p2ptrain.training.data.corpus import Corpus
    from p2ptrain.training.loop import Trainer
    from p2ptrain.training.optimizer import SwarmOptimizer
    from p2ptrain.training.state.shared_state import SharedState

logger = logging.getLogger(__name__)


async def build_trainer(peer: Peer, config: PeerConfig, run_dir: Path, bridge: Bridge) -> Trainer:
    """Return a trainer with its model and data, restored from the newest checkpoint and up to date with the swarm.

    Raises:
        ResourceError: The model exceeds the memory limit, or the device is missing.
        ConfigError: The text cannot be read.
        IncompatibleError: The other peers train a model of another shape.
    """
    from p2ptrain.training.checkpoints import SavePolicy
    from p2ptrain.training.checkpoints.files import load_newest_valid
    from p2ptrain.training.checkpoints.saving import Saver, restore_shared
    from p2ptrain.training.learning_rate import WrappedOptimizer, manifest_schedule
    from p2ptrain.training.optimizer import SwarmOptimizer

    loop = asyncio.get_running_loop()
    device = choose_device(config)
    module, corpus = await loop.run_in_executor(None, _load, peer, config, run_dir, device)
    inner, state = await peer.runtime.compute(_make_state, peer, module)
    directory, spec = run_dir / "checkpoints", peer.manifest.training
    checkpoint = await peer.runtime.compute(load_newest_valid, directory, peer.swarm, peer.jobs)
    if checkpoint is not None:
        await peer.runtime.compute(restore_shared, state, checkpoint)
    synchronizer = peer.train(state)
    tokens = spec.local_batch * peer.manifest.model.context
    wrapped = WrappedOptimizer(inner, manifest_schedule(spec), spec.clip_norm)
    optimizer = SwarmOptimizer(module, wrapped, synchronizer, bridge, spec, tokens)
    policy = SavePolicy(config.checkpoints.every_rounds, 0, config.checkpoints.keep_last)
    saver = Saver(directory, policy, optimizer, peer.swarm)
    if checkpoint is not None:
        await peer.runtime.compute(saver.restore, checkpoint)
        logger.info("restored round %d from %s", checkpoint.head.round, checkpoint.path)
    await enter_training(peer, optimizer.work)
    return _assemble(peer, config, run_dir, corpus, optimizer, saver)


def choose_device(config: PeerConfig) -> torch.device:
    """Return the config's device; set the number of threads, too.

    Raises:
        ResourceError: The device is missing.
    """
    import torch

    if config.resources.threads:
        torch.set_num_threads(config.resources.threads)
    wanted = config.resources.device
    if wanted == "auto":
        wanted = "cuda:0" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise ResourceError(
            f"device {wanted!r} was asked for, but torch sees no GPU: use --device cpu, or mend the driver"
        )
    return torch.device(wanted)


def _load(peer: Peer, config: PeerConfig, run_dir: Path, device: torch.device) -> tuple[torch.nn.Module, Corpus]:
    from p2ptrain.models import build_model, check_reads_text, estimate_memory_bytes, whole
    from p2ptrain.models.pretrained import local_data, weights_folder
    from p2ptrain.training.data.corpus import load_corpus

    manifest = peer.manifest
    check_reads_text(manifest.model)
    needed = estimate_memory_bytes(manifest.model, manifest.training)
    allowed = config.resources.max_memory
    if allowed and needed > allowed:
        raise ResourceError(
            f"this model needs about {needed / 1e9:.1f} GB, and the limit is {allowed / 1e9:.1f} GB: raise --max-memory"
        )
    model, cache = manifest.model, run_dir.parent / "data"
    corpus = load_corpus(local_data(manifest, config.weights), model.context, model.vocabulary, cache, peer.jobs)
    weights = weights_folder(model, whole(model), config.weights, peer.jobs)
    return build_model(model, weights, jobs=peer.jobs).to(device), corpus


def _make_state(peer: Peer, module: torch.nn.Module) -> tuple[torch.optim.Optimizer, SharedState]:
    import torch

    from p2ptrain.training.state.initial_state import initial_state

    spec = peer.manifest.training
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=spec.learning_rate, betas=(0.9, 0.95), weight_decay=spec.weight_decay
    )
    return optimizer, initial_state(module, None, peer.manifest, peer.swarm)


def _assemble(
    peer: Peer, config: PeerConfig, run_dir: Path, corpus: Corpus, optimizer: SwarmOptimizer, saver: Saver
) -> Trainer:
    from p2ptrain.training.loop import Progress, Trainer
    from p2ptrain.training.metrics import MetricsWriter

    manifest, sync, stop = peer.manifest, optimizer.synchronizer, config.stop_after
    limits = [limit for limit in (stop.at_round, manifest.training.rounds) if limit]
    if stop.rounds:
        limits.append(sync.head.round + stop.rounds)
    sync.last_round = min(limits, default=0)
    loop = asyncio.get_running_loop()

    def publish(progress: Progress) -> None:
        peer.status.note = progress.note
        paused = progress.note != "" and sync.is_paused
        if (peer.status.state == "paused") != paused:
            peer.set_state("paused" if paused else "training")
        peer.presence.changed()

    def publish_from_thread(progress: Progress) -> None:
        loop.call_soon_threadsafe(publish, progress)

    metrics = MetricsWriter(run_dir / "metrics.jsonl")
    trainer = Trainer(optimizer, saver, manifest, corpus, metrics, publish_from_thread)
    progress = trainer.progress

    def pace() -> Pace:
        return Pace(progress.loss, progress.tokens_per_second, optimizer.tokens_in_round)

    peer.activity = replace(peer.activity, pace=pace)
    return trainer
