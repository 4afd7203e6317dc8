"""The plan of ``p2ptrain up``: a signed manifest, and a role file for each peer."""

from __future__ import annotations

import argparse
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2ptrain.cli.manifests import KEY_FILE, load_manifest, named_paths, parse_settings, sign_manifest
from p2ptrain.cli.running import default_run_dir
from p2ptrain.cli.screen.bars import bars
from p2ptrain.cli.screen.live import Goal
from p2ptrain.cli.terms import check_memory, num_stages
from p2ptrain.cli.toml import to_toml
from p2ptrain.config import PeerConfig
from p2ptrain.errors import P2PTrainError, UsageError
from p2ptrain.manifest import OWN_FAMILIES, SIGNED_FILE, Manifest, former_manifest
from p2ptrain.network.identity import Identity

DEFAULT_MINUTES = 3.0
DEMO_SETTINGS: dict[str, Any] = {"name": "demo", "training.every": 1, "training.local_batch": 8}
"""Settings without ``--manifest``. Rounds are cheap on loopback, and with ``every = 1`` the swarm learns exactly as one
process with the same global batch."""
_LOOPBACK = "/ip4/127.0.0.1/tcp/0"


@dataclass(frozen=True)
class Plan:
    """Role files of the peers, the goal, whether to serve the status page (``monitor``), and to chat.

    ``chat`` has the options of ``p2ptrain chat`` behind the link; None if nothing is served. ``weights`` is the folder
    of a pretrained model that the manifest names.
    """

    run_dir: Path
    manifest: Manifest
    weights: Path | None
    bootstrap: Path
    trainers: tuple[Path, ...]
    goal: Goal
    monitor: bool
    chat: tuple[str, ...] | None = None

    @property
    def is_own_family(self) -> bool:
        """True if no other package brings the model's family: transformers knows all of these."""
        return self.manifest.model.family in OWN_FAMILIES


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Create the run directory with the signed manifest and the role files; an error removes a new one again."""
    run_dir: Path = (arguments.run_dir or default_run_dir(f"up-{time.strftime('%Y%m%d-%H%M%S')}")).absolute()
    is_new = not run_dir.exists()
    try:
        return _fill(run_dir, arguments)
    except P2PTrainError:
        if is_new:
            shutil.rmtree(run_dir, ignore_errors=True)
        raise


def _fill(run_dir: Path, arguments: argparse.Namespace) -> Plan:
    demo = DEMO_SETTINGS if arguments.manifest is None else {}
    chats = arguments.serve and arguments.manifest is None
    if chats:
        demo = demo | _served_model(arguments)
    overrides = demo | parse_settings(arguments.set) | _manifest_overrides(arguments)
    manifest, text = load_manifest(arguments.manifest, overrides), _text_source(arguments)
    if manifest.private is None and text is not None:
        manifest = load_manifest(arguments.manifest, overrides | {"data.source": text})
    _check_partition(arguments, manifest)
    run_dir.mkdir(parents=True, exist_ok=True)
    with Identity.create_or_load(run_dir / KEY_FILE) as organizer:
        former = former_manifest(run_dir / SIGNED_FILE, organizer)
        manifest = sign_manifest(manifest, organizer, run_dir / SIGNED_FILE, run_dir / "bootstrap").manifest
        done = _rounds_done(run_dir) if former == manifest else 0
    threads = arguments.threads or max(1, len(os.sched_getaffinity(0)) // arguments.peers)
    log = {"level": arguments.log_level or "info"}
    if arguments.log_format is not None:
        log["format"] = arguments.log_format

    own = [Path(value.removeprefix("path:")).expanduser().absolute() for value in named_paths(manifest).values()]

    def role_file(role: str, name: str, sections: dict[str, Any]) -> Path:
        values = {"role": role, "name": name, "run_dir": run_dir / name, "manifest": run_dir / SIGNED_FILE}
        values["allow_path"] = own
        settings = {"network": {"listen": [_LOOPBACK]}, "log": log}
        if arguments.weights is not None and role != "bootstrap":
            values["weights"] = arguments.weights.absolute()
        return _write_role_file(run_dir / f"{name}.toml", values | settings | sections)

    # An absolute round, because trainers may join in different rounds.
    at_round = done + arguments.rounds if arguments.rounds else 0
    sections = {
        "resources": {"device": arguments.device or "auto", "threads": threads},
        "stop_after": {"at_round": at_round},
        "guest": {"on_battery": True},
    }
    if arguments.serve:
        sections["serving"] = {"enabled": True}
    role = "stage" if chats else "both" if manifest.in_stages else "trainer"
    stages = num_stages(manifest, arguments.peers)
    bootstrap, trainers = role_file("bootstrap", "bootstrap", {}), []
    kind = "host" if chats else "trainer" if manifest.private is None else "site"
    names = [f"{kind}-{number + 1}" for number in range(arguments.peers)]
    texts = {name: run_dir / f"{name}.txt" for name in names} if manifest.private is not None else {}
    if texts:
        from p2ptrain.training.simulation.texts import deal_text

        form = arguments.partition or "iid"
        deal_text(manifest, text or "stdlib", form, list(texts.values()), arguments.weights, own)
    check_memory(manifest, arguments.peers, serves=chats)
    for number, name in enumerate(names):
        hosting = {"pipeline": {"stage": number % stages}} if manifest.in_stages else {}
        own_text = {"data": texts[name]} if texts else {}
        trainers.append(role_file(role, name, sections | hosting | own_text))
    has_end = arguments.rounds or manifest.training.rounds or chats
    minutes = arguments.minutes or (0.0 if has_end else DEFAULT_MINUTES)
    goal = Goal(minutes, min(filter(None, (at_round, manifest.training.rounds)), default=0))
    chat = _chat_options(arguments) if chats else None
    return Plan(run_dir, manifest, arguments.weights, bootstrap, tuple(trainers), goal, not arguments.no_monitor, chat)


def _served_model(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the manifest's settings of a served model, and point ``arguments.weights`` at its files."""
    from p2ptrain.cli.manifests import of_pretrained
    from p2ptrain.models.smollm2 import NAME, smollm2_folder

    model = arguments.model or NAME
    if model == NAME:
        model = str(smollm2_folder(default_run_dir("models"), bars))
    if not model.startswith("hub:"):
        arguments.weights = Path(model).expanduser()
    name = model.rpartition("/")[2].partition("@")[0]
    return {"name": name, "pipeline.stages": 2} | of_pretrained(model, 0)


def _chat_options(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return the options of ``p2ptrain chat`` for the served model."""
    return () if arguments.weights is None else ("--weights", str(arguments.weights.absolute()))


def _rounds_done(run_dir: Path) -> int:
    """Return the round of the newest checkpoint in the directory; 0 without one."""
    patterns = ("*/checkpoints/*-round-*", "*/checkpoints/*/*-round-*")  # The second matches stages.
    names = [path.name for pattern in patterns for path in run_dir.glob(pattern)]
    return max((int(number) for name in names if (number := name.rpartition("-")[2]).isdecimal()), default=0)


def _text_source(arguments: argparse.Namespace) -> str | None:
    """Return ``--data`` as a source of text."""
    data: str | None = arguments.data
    if data is None or data == "stdlib" or data.startswith(("datasets:", "path:")):
        return data
    if not Path(data).exists():
        raise UsageError(f"--data {data}: no such file or folder; datasets of a hub are written datasets:NAME")
    return f"path:{Path(data).absolute()}"


def _check_partition(arguments: argparse.Namespace, manifest: Manifest) -> None:
    """Raise `UsageError` if there are no sites with text, or ``--partition`` without sites."""
    if manifest.private is None and arguments.partition is not None:
        raise UsageError(
            f"--partition {arguments.partition}: all peers of this swarm read the same text; for sites with text of"
            " their own, add [private] to the manifest"
        )
    if manifest.private is not None and manifest.data.source != "own":
        raise UsageError(
            f"data.source = {manifest.data.source!r}: 'p2ptrain up' deals text to the sites of a private swarm; set"
            ' data.source = "own", or run the script that reads the data at each site'
        )


def _manifest_overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    overrides = {
        "training.every": arguments.every, "averaging.codec": arguments.codec, "pipeline.stages": arguments.stages,
    }  # fmt: skip
    return {key: value for key, value in overrides.items() if value is not None}


def _write_role_file(path: Path, values: dict[str, Any]) -> Path:
    path.write_text(to_toml(values), encoding="utf-8")
    PeerConfig.load(path)  # Refuses an invalid option here instead of in a child's log.
    return path
