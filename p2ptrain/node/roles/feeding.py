"""The sending side of a pipeline's peer: microbatches of the manifest's text, or of a script."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from p2ptrain.config import PeerConfig
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.node.peer import Peer
from p2ptrain.node.roles.materials import last_round, load_text
from p2ptrain.pipeline.client.sender import MicrobatchSender
from p2ptrain.pipeline.client.trainer import PipelineTrainer, SendingOptions
from p2ptrain.pipeline.plan import PipelinePlan
from p2ptrain.pipeline.view import PipelineView
from p2ptrain.training.loop import TrainingProgress
from p2ptrain.training.metrics import MetricsWriter


async def start_view(peer: Peer, plan: PipelinePlan) -> PipelineView:
    """Return a view of the pipeline that follows all records; this peer's record tells the failovers that it met."""
    view = PipelineView(plan, peer.identity.peer_id, peer.runtime)
    peer.presence.listeners.append(view.update)
    peer.record.parts.append(lambda record: replace(record, failovers=view.failovers))
    await peer.presence.refresh()
    return view


def start_sender(peer: Peer, view: PipelineView) -> MicrobatchSender:
    """Return a sender of microbatches; `Peer.close` closes it."""
    # Hosts may still know microbatch numbers of this peer's previous process.
    sender = MicrobatchSender(view.new_caller(peer.rpc), peer.identity, int(peer.runtime.now() * 1000))
    peer.on_close(sender.tasks.close)
    return sender


async def start_feeding(peer: Peer, config: PeerConfig, view: PipelineView) -> PipelineTrainer:
    """Return the trainer that sends the manifest's text; its caller runs it."""
    corpus = await asyncio.to_thread(load_text, peer, config)

    def publish(progress: TrainingProgress) -> None:
        peer.record.note = progress.note
        peer.presence.changed()

    options = SendingOptions(config.pipeline.credits, config.run_dir, lambda now: last_round(peer, config, now))
    metrics, sender = MetricsWriter(config.run_dir / "metrics.jsonl"), start_sender(peer, view)
    trainer = PipelineTrainer(sender, peer.manifest, corpus, metrics, options, publish)
    progress = trainer.progress

    def describe(record: PeerRecord) -> PeerRecord:
        return replace(record, loss=progress.loss, tokens_per_second=progress.tokens_per_second)

    peer.record.parts.append(describe)
    return trainer
