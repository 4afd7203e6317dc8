"""The terms of joining a swarm: told before the question, checked after it."""

from __future__ import annotations

import shutil
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from p2ptrain.config import PeerConfig, parse_size
from p2ptrain.errors import ConfigError, NotAdmittedError, ResourceError, UsageError
from p2ptrain.manifest import Manifest
from p2ptrain.models import OUTER_MOMENTS, PROCESS_BYTES, SERVING_PROCESS_BYTES, estimate_memory_bytes, num_parameters
from p2ptrain.models.pretrained import local_data, not_given
from p2ptrain.network.admission import Admission
from p2ptrain.network.identity import IDENTITY_FILE, Identity
from p2ptrain.node.meeting import credential_at_hand, what_to_do
from p2ptrain.pipeline.measure import available_memory
from p2ptrain.pipeline.plan import PipelinePlan, serving_bytes
from p2ptrain.status.formats import human_bytes, human_count

_SPARE_DISK_BYTES = 200_000_000
DAEMON_BYTES = 80 << 20
"""Resident memory of a network daemon with a few connections."""
BYTES_A_VALUE = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.03, "int4": 0.53}
"""Encoded size of a value, of codecs that send all of them; so that a look at terms does not import torch."""


@dataclass(frozen=True)
class Needs:
    """The least that a peer needs that trains, hosts a stage of a model in stages, or both.

    Attributes:
        parameters: Of the whole model.
        memory: Bytes; ``disk``: bytes for checkpoints.
        download: Bytes of the state that a newcomer fetches.
        round_bytes: Bytes that it sends in a round, and as many that it receives; None if they depend on more.
    """

    parameters: int
    memory: int
    disk: int
    download: int
    round_bytes: int | None


def needs_of(manifest: Manifest) -> Needs:
    """Return what a peer with the default settings needs; raise the errors of `get_family` and `PipelinePlan`."""
    role: Literal["both", "trainer"] = "both" if manifest.in_stages else "trainer"
    config = PeerConfig(role=role, link="p2ptrain://")
    memory, checkpoint = _needed_bytes(manifest, config)
    disk, values = _disk_bytes(checkpoint, config), num_parameters(manifest.model)
    if manifest.in_stages:
        plan = PipelinePlan(manifest)
        return Needs(values, memory, disk, min(map(plan.state_bytes, range(plan.num_stages))), None)
    size = BYTES_A_VALUE.get(manifest.averaging.codec)
    # A peer of many sends the parts of others, and its own share's mean to them: almost two vectors.
    sent = 2 * size * values / manifest.training.fragments if size is not None else None
    return Needs(values, memory, disk, _state_bytes(manifest), None if sent is None else int(sent))


def describe(manifest: Manifest, config: PeerConfig) -> str:
    """Return lines about what joining downloads, runs and exposes.

    The manifest's texts are quoted, in letters of one column, and long lines go on indented: no text looks like a line.

    Raises:
        ConfigError: The manifest names files of this machine that the config does not allow, or that it lacks.
    """
    resources, directory = config.resources, config.network.directory
    caps = [f"{name} {human_bytes(rate)}/s" for name, rate in (("up", resources.up), ("down", resources.down)) if rate]
    if config.role == "server":
        runs, sends = _of_server(manifest, config)
    else:
        runs, sends = _of_stages(manifest, config) if manifest.in_stages else _of_whole_model(manifest, config)
    lines = [
        f"swarm      {manifest.name!r}, by organizer {manifest.organizer}",
        *runs,
        f"sends      {sends}{'; ' + ', '.join(caps) if caps else ''}",
        f"exposes    {', '.join(config.network.listen)}: this machine's addresses, name, speed and progress are"
        " public to the swarm; none of your files are",
        *([f"tells      {directory} the same"] if directory else []),
        *(["serves     answers to whoever is in the swarm; this peer sees their prompts"] * config.serving.enabled),
        f"writes     {config.run_dir}",
    ]
    width = shutil.get_terminal_size().columns
    return "\n".join(textwrap.fill(line, width, subsequent_indent=" " * 11, break_on_hyphens=False) for line in lines)


def _of_server(manifest: Manifest, config: PeerConfig) -> tuple[list[str], str]:
    """Return the lines about what a peer that does not train serves, and what it sends."""
    needs = serving_bytes(manifest, config.serving.weights, config.serving.cache)
    wanted = config.pipeline.stage
    chosen = needs[wanted : wanted + 1] if wanted >= 0 else needs
    which = "the whole model" if len(needs) == 1 else f"stage {wanted}" if wanted >= 0 else "the stage with least hosts"
    low, high = human_bytes(min(chosen or needs)), human_bytes(max(chosen or needs))
    runs = [
        "downloads  the weights of what it serves, again and again as rounds end, from peers that train",
        f"hosts      {which} of {manifest.model.family}, and does not train; CPU, about"
        f" {low if low == high else f'{low} to {high}'} of memory",
    ]
    return runs, "hidden states and tokens of those who generate"


def _of_whole_model(manifest: Manifest, config: PeerConfig) -> tuple[list[str], str]:
    """Return the lines about the model, and what is sent."""
    parameters, training, resources = num_parameters(manifest.model), manifest.training, config.resources
    threads = {0: "all threads", 1: "1 thread"}.get(resources.threads, f"{resources.threads} threads")
    memory = human_bytes(estimate_memory_bytes(manifest))
    source = local_data(manifest, config.weights, config.allow_path, config.data).source
    if config.data is not None and not config.data.expanduser().exists():
        raise ConfigError(f"--data {config.data}: there is no such file or folder")
    text = f"your text in {str(config.data)!a}" if config.data is not None else f"{source!a}"
    runs = [
        f"downloads  the state of the model, about {human_bytes(_state_bytes(manifest))}, from peers",
        f"runs       {manifest.model.family}, {human_count(parameters)} parameters, on {text};"
        f" device {resources.device}, {threads}, about {memory} of memory",
    ]
    sent = "gradients after each global batch" if training.every == 1 else f"updates every {training.every} steps"
    if manifest.private is not None:
        count = {"samples": " and the number of samples", "bucketed": " and the number of samples, rounded"}
        told = f"losses{count.get(manifest.private.weights, '')}"
        less = f", less what {config.policy} keeps" if config.policy is not None else ""
        updates = "updates of the model" if manifest.secure_aggregation is None else "sums of updates of the model"
        runs.append(f"keeps      your text on this machine; others see {updates}, {told}{less}")
    if (privacy := manifest.differential_privacy) is not None:
        runs.append(
            f"protects   each sample of {manifest.model.context} tokens by noise: ε at most {privacy.epsilon:g} at"
            f" δ {privacy.delta:g} (differential privacy); then this peer trains no more, and follows"
        )
    return runs, f"{manifest.averaging.codec} {sent}"


def _state_bytes(manifest: Manifest) -> int:
    """Return the size of the state of a model that is not cut."""
    training = manifest.training
    moments = 2 if training.every == 1 else OUTER_MOMENTS[training.outer]
    return num_parameters(manifest.model) * 4 * (1 + moments)


def _of_stages(manifest: Manifest, config: PeerConfig) -> tuple[list[str], str]:
    """Return the lines about the stages, and what is sent."""
    plan = PipelinePlan(manifest)
    wanted, numbers = config.pipeline.stage, _stages_to_host(plan, config)
    sizes = [plan.state_bytes(number) for number in numbers]
    needs = [plan.needs[number].memory for number in numbers]

    def between(values: list[int], show: Callable[[float], str]) -> str:
        low, high = show(min(values)), show(max(values))
        return low if low == high else f"{low} to {high}"

    runs = []
    if config.role != "trainer":
        parameters = human_count(num_parameters(manifest.model))
        which = f"stage {wanted}" if wanted >= 0 else "the stage that needs it most"
        state = between(sizes, human_bytes)
        runs.append(f"downloads  the state of one of {plan.num_stages} stages, about {state}, from peers")
        if manifest.model.weights and config.weights is None:
            runs.append(f"begins     with the blocks of that stage in {manifest.model.weights!a}")
        runs.append(
            f"hosts      {which} of {manifest.model.family}, {parameters} parameters; device {config.resources.device},"
            f" about {between(needs, human_bytes)} of memory"
        )
        if manifest.lora is not None:
            runs.append(f"trains     adapters of {', '.join(map(ascii, manifest.lora.targets))} alone")
    if config.role != "stage":
        source = local_data(manifest, config.weights, config.allow_path, config.data).source
        runs.append(f"reads      {source!a}, and sends it through all stages")
    return runs, f"{manifest.pipeline.codec} activations, {manifest.averaging.codec} updates"


def _stages_to_host(plan: PipelinePlan, config: PeerConfig) -> list[int]:
    """Return the chosen stage, or all if none is chosen; raise `ConfigError` if it does not exist."""
    wanted = config.pipeline.stage
    if wanted >= plan.num_stages:
        raise ConfigError(f"--stage {wanted}: the stages of this swarm are 0 to {plan.num_stages - 1}")
    return [wanted] if wanted >= 0 else list(range(plan.num_stages))


def _needed_bytes(manifest: Manifest, config: PeerConfig) -> tuple[int, int]:
    """Return the bytes of memory and of a checkpoint; of the smallest stage if none is chosen."""
    if config.role == "server":
        needs, stage = serving_bytes(manifest, config.serving.weights, config.serving.cache), config.pipeline.stage
        return (needs[stage] if 0 <= stage < len(needs) else min(needs)), 0
    if not manifest.in_stages:
        return estimate_memory_bytes(manifest), 5 * 4 * num_parameters(manifest.model)
    if config.role == "trainer":
        return PROCESS_BYTES, 0
    plan = PipelinePlan(manifest)
    return min((plan.needs[number].memory, plan.state_bytes(number)) for number in _stages_to_host(plan, config))


def _disk_bytes(checkpoint: int, config: PeerConfig) -> int:
    # A new checkpoint is complete before the oldest is removed.
    return (config.checkpoints.keep_last + 1) * checkpoint + _SPARE_DISK_BYTES


def check_admission(manifest: Manifest, invite: bytes, run_dir: Path) -> None:
    """Raise `NotAdmittedError`, with this peer's id, if neither a link's invite nor an earlier run admits this peer."""
    if manifest.admission.mode == "open":
        return
    admission = Admission(manifest, time.time)
    with Identity.create_or_load(run_dir / IDENTITY_FILE) as identity:
        _, reason = credential_at_hand(admission, identity.peer_id, invite, run_dir)
        if reason:
            raise NotAdmittedError(what_to_do(admission, identity.peer_id, reason))


def num_stages(manifest: Manifest, peers: int) -> int:
    """Return the number of the model's stages; raise `UsageError` if there are fewer local peers."""
    stages = PipelinePlan(manifest).num_stages if manifest.in_stages else 1
    if peers < stages:
        raise UsageError(f"--peers {peers}: the model has {stages} stages, and each needs a host")
    return stages


def check_memory(manifest: Manifest, peers: int, *, serves: bool) -> None:
    """Raise `ResourceError` if so many local peers exceed the free memory; if they only serve, without their models."""
    each, free = DAEMON_BYTES + (SERVING_PROCESS_BYTES if serves else needs_of(manifest).memory), available_memory()
    if peers * each > free:
        what = f"--peers {peers}: each needs about {human_bytes(each)} of memory"
        raise ResourceError(f"{what} and {human_bytes(free)} is free: start fewer, or close other programs")


def check_machine(manifest: Manifest, config: PeerConfig) -> None:
    """Check memory, disk and local files before anything is downloaded.

    Raises:
        ResourceError: Memory or disk space is too small; the message names both amounts.
        ConfigError: The swarm's data or pretrained model is at a path that does not exist here.
    """
    needed, checkpoint = _needed_bytes(manifest, config)
    available = config.resources.max_memory or available_memory()
    if needed > available:
        does = "serving" if config.role == "server" else "training"
        raise ResourceError(
            f"{does} needs about {human_bytes(needed)} of memory and {human_bytes(available)} is free:"
            " close other programs, or use a larger machine"
        )
    config.run_dir.mkdir(parents=True, exist_ok=True)
    disk = _disk_bytes(checkpoint, config)
    free = shutil.disk_usage(config.run_dir).free
    if disk > free:
        raise ResourceError(
            f"checkpoints need about {human_bytes(disk)} of disk and {human_bytes(free)} is free in {config.run_dir}:"
            " choose another --run-dir"
        )
    needs = {}
    if config.role not in ("stage", "server"):
        data = local_data(manifest, config.weights, config.allow_path, config.data)
        needs = {"data.source": data.source, "data.tokenizer": data.tokenizer}
    if manifest.model.weights.startswith("local:") and (config.role != "trainer" or not manifest.in_stages):
        if config.weights is None:
            raise ConfigError(not_given("model.weights", manifest.model.weights))
        needs["model.weights"] = f"path:{config.weights}"
    for kind, source in needs.items():
        scheme, _, path = source.partition(":")
        if scheme == "path" and not Path(path).expanduser().exists():
            raise ConfigError(
                f"the swarm's {kind} is {path}, which is not on this machine: ask its organizer for a copy"
            )


def can_train(manifest: Manifest, max_memory: str | None, stage: int | None) -> bool:
    """True if this machine has the memory to train; else print that it only serves."""
    memory = _memory(max_memory)
    if manifest.in_stages:
        needs = [need.memory for need in PipelinePlan(manifest).needs]
        needed = needs[stage] if stage is not None and 0 <= stage < len(needs) else min(needs)
    else:
        needed = estimate_memory_bytes(manifest)
    if needed > memory:
        print(
            f"training takes {human_bytes(needed)} of memory, and this machine has {human_bytes(memory)}: it only"
            " serves; --role insists on training"
        )
    return needed <= memory


def _memory(max_memory: str | None) -> int:
    """Return the memory that may be used, in bytes: ``max_memory``, by default this machine's."""
    try:
        return parse_size(max_memory or 0) or available_memory()
    except ValueError as error:
        raise ConfigError(f"--max-memory: {error}") from error


def has_room(manifest: Manifest, max_memory: str | None) -> bool:
    """True if a stage fits into ``max_memory``, by default this machine's; else print that the peer hosts none."""
    memory = _memory(max_memory)
    least = min(need.memory for need in PipelinePlan(manifest).needs)
    if least > memory:
        print(
            f"no stage fits into {human_bytes(memory)} of memory: the smallest takes {human_bytes(least)}. This machine"
            " sends text through those of others; --role stage insists"
        )
    return least <= memory
