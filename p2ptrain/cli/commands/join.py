"""``p2ptrain join LINK``

Take part in a swarm. Fetches its manifest and checks that it is the one that the link names, shows what will be
downloaded, run and exposed, asks once, checks that this machine can do it, takes on the swarm's state and trains.
Ctrl-C leaves in good order. Started again with the same --run-dir, this peer has the same identity.
On a terminal a live view of the peer and its swarm stands below the log; in a pipe there are log lines alone.

Where the swarm's model is cut into stages, it hosts the stage that needs it most, says why, and sends text through all
of them; --role and --stage say otherwise.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.cli.commands.peer import add_peer_arguments, peer_overrides
from p2ptrain.errors import ConfigError, IncompatibleError, ResourceError

if TYPE_CHECKING:
    from p2ptrain.config import PeerConfig
    from p2ptrain.manifest import Manifest, SignedManifest
    from p2ptrain.network.link import SwarmLink

LOG_LEVEL = "info"
_MOMENTS = {"average": 0, "nesterov": 1, "adam": 2}
"""fp32 values of shared optimizer state per parameter, by outer optimizer."""
_SPARE_DISK_BYTES = 200_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("link", metavar="LINK", help="the swarm link, 'p2ptrain://…', in quotes")
    parser.add_argument(
        "--role",
        choices=("trainer", "stage", "both"),
        help="of a model in stages: send text, host one, or both (default)",
    )
    parser.add_argument("--stage", type=int, metavar="N", help="host this stage (default: the one that needs it most)")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="where to keep this peer's files (default runs/join-DIGEST)"
    )
    parser.add_argument("--minutes", type=float, metavar="N", help="leave after this time (default never)")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="leave after so many more rounds of the swarm (default never)"
    )
    add_peer_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Describe the swarm, ask for consent, check the machine, and run the peer."""
    from p2ptrain.cli.running import confirm, default_run_dir, run_async, run_configured_peer
    from p2ptrain.config import PeerConfig
    from p2ptrain.network.link import SwarmLink

    link = SwarmLink.parse(arguments.link)
    overrides = peer_overrides(arguments) | {
        "role": "trainer",
        "link": str(link),
        "run_dir": arguments.run_dir or default_run_dir(f"join-{link.digest.hex()[:8]}"),
        "network.auto_nat": True,
        "network.directory": link.directory or None,
        "stop_after.minutes": arguments.minutes,
        "stop_after.rounds": arguments.rounds,
    }
    signed = run_async(_fetch(link))
    check_compatible(signed.manifest)
    overrides |= in_pipeline(arguments, signed.manifest)
    config = PeerConfig.load(None, overrides)
    print(describe(signed, config))
    if not confirm("Take part?", assume_yes=arguments.yes):
        print("nothing was started")
        return 0
    check_machine(signed.manifest, config)
    return run_configured_peer(config, signed, "joined; others can take part with:\n\np2ptrain join ")


def in_pipeline(arguments: argparse.Namespace, manifest: Manifest) -> dict[str, object]:
    """Return the configuration of --role and --stage for this swarm.

    Raises:
        UsageError: The options do not apply to this swarm.
    """
    from p2ptrain.errors import UsageError

    if not manifest.in_stages:
        given = (
            "--role" if arguments.role not in (None, "trainer") else "--stage" if arguments.stage is not None else ""
        )
        if given:
            raise UsageError(f"{given}: this swarm's model is not cut into stages; every trainer holds all of it")
        return {}
    if arguments.role == "trainer" and arguments.stage is not None:
        raise UsageError("--stage: a trainer hosts none; use --role stage or both")
    role = arguments.role or ("both" if arguments.stage is not None or _has_room(arguments, manifest) else "trainer")
    return {"role": role, "pipeline.stage": arguments.stage}


def _has_room(arguments: argparse.Namespace, manifest: Manifest) -> bool:
    """True if a stage fits into this machine's memory; else print that the peer hosts none.

    Raises:
        ConfigError: --max-memory is invalid.
    """
    from p2ptrain.config import parse_size
    from p2ptrain.pipeline.measure import available_memory
    from p2ptrain.pipeline.plan import PipelinePlan
    from p2ptrain.status.formats import human_bytes

    try:
        memory = parse_size(arguments.max_memory or 0) or available_memory()
    except ValueError as error:
        raise ConfigError(f"--max-memory: {error}") from error
    least = min(need.memory for need in PipelinePlan(manifest).needs)
    if least > memory:
        print(
            f"no stage fits into {human_bytes(memory)} of memory: the smallest takes {human_bytes(least)}. This machine"
            " sends text through those of others; --role stage insists"
        )
    return least <= memory


async def _fetch(link: SwarmLink) -> SignedManifest:
    from p2ptrain.node.observe import fetch_manifest

    return await fetch_manifest(link)


def check_compatible(manifest: Manifest) -> None:
    """Check that this version can join the swarm.

    Raises:
        IncompatibleError: The protocol, model family, codec or rule is unknown; the message names the remedy.
        UsageError: The swarm trains a custom model, which only its own script can build.
    """
    from p2ptrain.manifest import PROTOCOL_VERSION
    from p2ptrain.models import check_reads_text
    from p2ptrain.node.extensions import check_extensions

    if manifest.protocol != PROTOCOL_VERSION:
        raise IncompatibleError(
            f"the swarm speaks protocol {manifest.protocol}, this version {PROTOCOL_VERSION}:"
            " install the swarm's version"
        )
    check_extensions(manifest)
    check_reads_text(manifest.model)


def describe(signed: SignedManifest, config: PeerConfig) -> str:
    """Return lines about what joining downloads, runs and exposes."""
    from p2ptrain.models import estimate_memory_bytes, num_parameters
    from p2ptrain.status.formats import human_bytes, human_count

    manifest, resources = signed.manifest, config.resources
    if manifest.in_stages:
        return _describe_stages(signed, config)
    parameters = num_parameters(manifest.model)
    memory = estimate_memory_bytes(manifest.model, manifest.training)
    moments = 2 if manifest.training.every == 1 else _MOMENTS[manifest.training.outer]
    state = human_bytes(parameters * 4 * (1 + moments))
    threads = {0: "all threads", 1: "1 thread"}.get(resources.threads, f"{resources.threads} threads")
    caps = [f"{name} {human_bytes(rate)}/s" for name, rate in (("up", resources.up), ("down", resources.down)) if rate]
    steps = "gradients each global batch" if manifest.training.every == 1 else f"{manifest.training.every} steps"
    return "\n".join(
        [
            f"swarm      {manifest.name!r}, by organizer {signed.organizer}",
            f"downloads  the state of the model, about {state}, from peers",
            f"runs       {manifest.model.family}, {human_count(parameters)} parameters, on {manifest.data.source};"
            f" device {resources.device}, {threads}, about {human_bytes(memory)} of memory",
            f"sends      {manifest.averaging.codec} updates every {steps}{'; ' + ', '.join(caps) if caps else ''}",
            *_exposes(config),
        ]
    )


def _exposes(config: PeerConfig) -> list[str]:
    directory = config.network.directory
    return [
        f"exposes    {', '.join(config.network.listen)}: this machine's addresses, name, speed and progress are"
        " public to the swarm; none of your files are",
        *([f"tells      {directory} the same"] if directory else []),
        f"writes     {config.run_dir}",
    ]


def _describe_stages(signed: SignedManifest, config: PeerConfig) -> str:
    from p2ptrain.models import num_parameters
    from p2ptrain.pipeline.plan import PipelinePlan
    from p2ptrain.status.formats import human_bytes, human_count

    manifest, resources = signed.manifest, config.resources
    plan = PipelinePlan(manifest)
    wanted = config.pipeline.stage
    numbers = [wanted] if 0 <= wanted < plan.num_stages else list(range(plan.num_stages))
    sizes = [plan.state_bytes(number) for number in numbers]
    needs = [plan.needs[number].memory for number in numbers]

    def between(values: list[int], show: Callable[[float], str]) -> str:
        low, high = show(min(values)), show(max(values))
        return low if low == high else f"{low} to {high}"

    caps = [f"{name} {human_bytes(rate)}/s" for name, rate in (("up", resources.up), ("down", resources.down)) if rate]
    parameters = human_count(num_parameters(manifest.model))
    which = f"stage {wanted}" if wanted >= 0 else "the stage that needs it most"
    hosts = [
        f"downloads  the state of one of {plan.num_stages} stages, about {between(sizes, human_bytes)}, from peers",
        f"hosts      {which} of {manifest.model.family}, {parameters} parameters; device {resources.device}, about"
        f" {between(needs, human_bytes)} of memory",
    ]
    if manifest.model.weights and config.weights is None:
        hosts.insert(1, f"begins     with the blocks of that stage in {manifest.model.weights}")
    if manifest.lora is not None:
        hosts.append(f"trains     adapters of {', '.join(manifest.lora.targets)} alone")
    feeds = [f"reads      {manifest.data.source}, and sends it through all stages"]
    return "\n".join(
        [
            f"swarm      {manifest.name!r}, by organizer {signed.organizer}",
            *(hosts if config.role != "trainer" else []),
            *(feeds if config.role != "stage" else []),
            f"sends      {manifest.pipeline.codec} activations, {manifest.averaging.codec} updates"
            f"{'; ' + ', '.join(caps) if caps else ''}",
            *_exposes(config),
        ]
    )


def _least_stage(manifest: Manifest, config: PeerConfig) -> tuple[int, int]:
    """Return the bytes of memory and of state of the stage to host; of the smallest one if none is chosen."""
    from p2ptrain.models import PROCESS_BYTES
    from p2ptrain.pipeline.plan import PipelinePlan

    if config.role == "trainer":
        return PROCESS_BYTES, 0
    plan = PipelinePlan(manifest)
    numbers = [config.pipeline.stage] if 0 <= config.pipeline.stage < plan.num_stages else range(plan.num_stages)
    return min((plan.needs[number].memory, plan.state_bytes(number)) for number in numbers)


def check_machine(manifest: Manifest, config: PeerConfig) -> None:
    """Check memory, disk and local files before anything is downloaded.

    Raises:
        ResourceError: Memory or disk space is too small; the message names both amounts.
        ConfigError: The swarm's data or pretrained model is at a path that does not exist here.
    """
    import shutil

    import psutil

    from p2ptrain.models import estimate_memory_bytes, num_parameters
    from p2ptrain.models.pretrained import local_data, not_given
    from p2ptrain.status.formats import human_bytes

    needed = estimate_memory_bytes(manifest.model, manifest.training)
    checkpoint = 5 * 4 * num_parameters(manifest.model)
    if manifest.in_stages:
        needed, checkpoint = _least_stage(manifest, config)
    available = psutil.virtual_memory().available
    if needed > available:
        raise ResourceError(
            f"training needs about {human_bytes(needed)} of memory and {human_bytes(available)} is free:"
            " close other programs, or use a larger machine"
        )
    config.run_dir.mkdir(parents=True, exist_ok=True)
    # A new checkpoint is complete before the oldest is removed.
    disk = (config.checkpoints.keep_last + 1) * checkpoint + _SPARE_DISK_BYTES
    free = shutil.disk_usage(config.run_dir).free
    if disk > free:
        raise ResourceError(
            f"checkpoints need about {human_bytes(disk)} of disk and {human_bytes(free)} is free in {config.run_dir}:"
            " choose another --run-dir"
        )
    needs = {}
    if config.role != "stage":
        data = local_data(manifest, config.weights)
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
