"""A script's own model in the swarm: what `Swarm.optimizer` and `Swarm.pipeline` make."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from p2ptrain.node.roles.feeding import start_sender, start_view
from p2ptrain.node.roles.training import start_training
from p2ptrain.node.thread import PeerThread
from p2ptrain.pipeline.client.remote_model import PipelineModule
from p2ptrain.pipeline.plan import PipelinePlan
from p2ptrain.training.checkpoints import SavePolicy
from p2ptrain.training.checkpoints.saving import Saver
from p2ptrain.training.learning_rate import WrappedOptimizer, by_round
from p2ptrain.training.optimizer import SPENT_BUDGET, SwarmOptimizer
from p2ptrain.training.optimizer_checks import check_optimizer
from p2ptrain.training.private.site import Site
from p2ptrain.training.state.initial_state import initial_state

logger = logging.getLogger(__name__)


def share_optimizer(
    running: PeerThread,
    model: torch.nn.Module,
    inner: torch.optim.Optimizer,
    saving: SavePolicy,
    *,
    clip_norm: float,
    samples: int,
    tokens: int,
    schedule: Callable[[int], float] | None,
    site_samples: int | None,
) -> tuple[SwarmOptimizer, Saver | None]:
    """Return the swarm's optimizer around ``inner``, and its saver if there is a run directory; see `Swarm.optimizer`.

    Args:
        samples, tokens: Of one local batch.
        site_samples: This peer's training samples in a private swarm; None in others.
    """
    peer, manifest = running.peer, running.peer.manifest
    spec, run_dir = manifest.training, peer.options.run_dir
    for oddity in check_optimizer(model, inner, spec.every):
        logger.warning("%s", oddity)
    wrapped = WrappedOptimizer(inner, by_round(schedule, spec.steps_per_round) if schedule else None, clip_norm)
    state = initial_state(model, wrapped, manifest, peer.swarm)
    bridge = running.bridge()
    site = Site.open(manifest, model, site_samples, run_dir)
    starting = start_training(
        peer, state,
        lambda synchronizer: SwarmOptimizer(
            model, wrapped, synchronizer, bridge, spec, tokens, site
        ),
        run_dir / "checkpoints" if run_dir is not None else None, saving,
    )  # fmt: skip
    shared, saver = running.thread.call(starting)
    shared.samples_per_step = samples
    shared.synchronizer.last_round = peer.held.departures.last_round(shared.synchronizer.head.round)
    if saver is not None:
        shared.register_step_post_hook(lambda *_: saver.save_if_due())
    peer.record.parts.append(
        lambda record: replace(
            record,
            # A loss of training samples would tell of them beside what the budget covers.
            loss=shared.loss if shared.privacy is None else None,
            state="resting" if shared.is_spent else record.state,
            note=SPENT_BUDGET if shared.is_spent else record.note,
            tokens_per_second=shared.tokens_per_second,
            round_tokens=shared.work.tokens,
            evaluation=shared.evaluation,
            privacy=shared.privacy,
        )
    )
    return shared, saver


def share_model(running: PeerThread) -> PipelineModule:
    """Return the swarm's model on the hosts of its stages; see `Swarm.pipeline`."""
    peer, bridge = running.peer, running.bridge()
    plan = PipelinePlan(peer.manifest)

    async def start() -> PipelineModule:
        sender = start_sender(peer, await start_view(peer, plan))
        peer.set_state("training")
        return PipelineModule(sender, plan, bridge)

    module = running.thread.call(start())
    peer.record.parts.append(lambda record: replace(record, loss=module.loss))
    return module
