"""A role's device, text, model or stage, and last round, from its role file and the manifest."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

from p2ptrain.config import PeerConfig
from p2ptrain.errors import ResourceError
from p2ptrain.models import build_model, check_reads_text, estimate_memory_bytes, whole
from p2ptrain.models.pretrained import local_data, weights_folder
from p2ptrain.node.guest.gpu import fitting_gpu, limit_memory
from p2ptrain.node.peer import Peer
from p2ptrain.pipeline.plan import PipelinePlan
from p2ptrain.pipeline.stage.compute import StageCompute
from p2ptrain.pipeline.stage.device import Device
from p2ptrain.pipeline.stage.worker import StageWorker
from p2ptrain.training.data.corpus import Corpus, load_corpus


def choose_device(config: PeerConfig) -> torch.device:
    """Return the config's device, and set its limits: of threads, and of a GPU's memory.

    Raises:
        ResourceError: The device is missing.
    """
    if config.resources.threads:
        torch.set_num_threads(config.resources.threads)
    wanted = config.resources.device
    if wanted == "auto":
        wanted = "cuda:0" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        raise ResourceError(
            f"device {wanted!r} was asked for, but torch sees no GPU: use --device cpu, or mend the driver"
        )
    device = torch.device(wanted)
    limit_memory(device, config.resources.max_gpu_memory)
    return device


def load_text(peer: Peer, config: PeerConfig) -> Corpus:
    """Return the manifest's text; raise `UsageError` if the model does not learn from text."""
    model = peer.manifest.model
    check_reads_text(model)
    data = local_data(peer.manifest, config.weights, config.allow_path, config.data)
    # A cache would be a copy of the site's records that outlives them, in a folder that consent does not name.
    cache = config.run_dir.parent / "data" if peer.manifest.private is None else None
    return load_corpus(data, model.context, model.vocabulary, cache, peer.jobs)


def build_whole_model(peer: Peer, config: PeerConfig) -> torch.nn.Module:
    """Return the manifest's model on the config's device; raise `ResourceError` if it exceeds the memory limit."""
    device, model = choose_device(config), peer.manifest.model
    needed, allowed = estimate_memory_bytes(peer.manifest), config.resources.max_memory
    if allowed and needed > allowed:
        raise ResourceError(
            f"this model needs about {needed / 1e9:.1f} GB, and the limit is {allowed / 1e9:.1f} GB: raise --max-memory"
        )
    weights = weights_folder(model, whole(model), config.weights, peer.jobs)
    built = build_model(model, weights, jobs=peer.jobs)
    with fitting_gpu():
        return built.to(device)


async def build_worker(peer: Peer, config: PeerConfig, plan: PipelinePlan, stage: int) -> StageWorker:
    """Return the worker of a stage, whose module is on the config's device."""

    def build() -> Any:
        weights = weights_folder(peer.manifest.model, plan.spans[stage], config.weights, peer.jobs)
        built = plan.build(stage, weights, peer.jobs)
        with fitting_gpu():
            return built.to(choose_device(config))

    return StageWorker(plan, stage, StageCompute(await asyncio.to_thread(build)), Device(peer.runtime))


def last_round(peer: Peer, config: PeerConfig, now: int) -> int:
    """Return the round at which this peer leaves, if round ``now`` is its first; 0 for never."""
    stop = config.stop_after
    limits = [
        peer.held.departures.last_round(now),
        stop.at_round,
        peer.manifest.training.rounds,
        now + stop.rounds if stop.rounds else 0,
    ]
    return min(filter(None, limits), default=0)
