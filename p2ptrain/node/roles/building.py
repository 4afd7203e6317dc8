"""Construction of a trainer of the manifest's whole model: data, model, state, checkpoint, optimizer."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from p2ptrain.config import PeerConfig
from p2ptrain.node.peer import Peer
from p2ptrain.node.roles.materials import build_whole_model, last_round, load_text
from p2ptrain.node.roles.training import start_training
from p2ptrain.training.bridge import Bridge
from p2ptrain.training.checkpoints import SavePolicy
from p2ptrain.training.learning_rate import manifest_optimizer
from p2ptrain.training.loop import Trainer, TrainingProgress
from p2ptrain.training.metrics import MetricsWriter
from p2ptrain.training.optimizer import SwarmOptimizer
from p2ptrain.training.private.site import Site
from p2ptrain.training.state.initial_state import initial_state


async def build_trainer(peer: Peer, config: PeerConfig, bridge: Bridge) -> Trainer:
    """Return a trainer with its model and data, restored from the newest checkpoint and up to date with the swarm."""
    loop, manifest, spec = asyncio.get_running_loop(), peer.manifest, peer.manifest.training
    corpus = await asyncio.to_thread(load_text, peer, config)
    module = await asyncio.to_thread(build_whole_model, peer, config)
    wrapped = await peer.runtime.compute(manifest_optimizer, module, spec)
    state = await peer.runtime.compute(initial_state, module, None, manifest, peer.swarm)
    tokens = spec.local_batch * manifest.model.context
    num_samples = None if manifest.private is None else (len(corpus.train) - 1) // manifest.model.context
    site = Site.open(manifest, module, num_samples, config.run_dir)
    policy = SavePolicy(config.checkpoints.every_rounds, 0, config.checkpoints.keep_last)
    optimizer, saver = await start_training(
        peer, state,
        lambda synchronizer: SwarmOptimizer(
            module, wrapped, synchronizer, bridge, spec, tokens, site
        ),
        config.run_dir / "checkpoints", policy,
    )  # fmt: skip
    synchronizer = optimizer.synchronizer
    synchronizer.last_round = last_round(peer, config, synchronizer.head.round)
    assert saver is not None

    def publish(progress: TrainingProgress) -> None:
        peer.record.note = progress.note
        paused = progress.note != "" and synchronizer.is_paused
        state = "resting" if progress.is_resting else "paused" if paused else "training"
        if peer.record.state != state:
            if peer.record.state == "resting":
                synchronizer.averager.matchmaker.announce_soon(synchronizer.head)
            peer.set_state(state)
        peer.presence.changed()

    metrics = MetricsWriter(config.run_dir / "metrics.jsonl")
    trainer = Trainer(
        optimizer, saver, manifest, corpus, metrics, lambda progress: loop.call_soon_threadsafe(publish, progress)
    )
    progress = trainer.progress
    peer.record.parts.append(
        lambda record: replace(
            # A loss of training samples would tell of them beside what the budget covers.
            record, loss=progress.loss if site is None or site.privacy is None else None, privacy=optimizer.privacy,
            tokens_per_second=progress.tokens_per_second,
            round_tokens=optimizer.work.tokens, doubts=tuple(trainer.audits.doubtful), evaluation=optimizer.evaluation,
            banned=tuple(sorted(synchronizer.head.table.banned)),
        )
    )  # fmt: skip
    return trainer
