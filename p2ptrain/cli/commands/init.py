"""``p2ptrain init DIR``

Write DIR/run.toml, in which the settings that organizers change are explained and set to what suits volunteers who do
not know each other, and DIR/organizer.key, which signs it. All other settings have their defaults; --all writes them,
too. Edit run.toml, then start the swarm with 'p2ptrain seed DIR'.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from p2ptrain.errors import UsageError

AMONG_STRANGERS = {"averaging.spot_checks": 4}
"""Settings for mutually untrusted peers; the defaults suit one person's machines, as with 'p2ptrain up'."""

COMMON = frozenset(
    {
        "name", "model.family", "model.layers", "model.hidden", "model.heads", "model.intermediate", "model.vocabulary",
        "model.context", "data.source", "data.tokenizer", "training.every", "training.local_batch",
        "training.global_batch", "training.learning_rate", "training.rounds", "model.image_size", "model.patch_size",
        "model.channels", "model.classes", "averaging.codec", "averaging.min_peers", "averaging.spot_checks",
        "admission.mode",
    }
)  # fmt: skip
"""Settings that are written without ``--all``."""

_HEADER = """\
# What the peers of this swarm agree on. Edit it, then run: p2ptrain seed {directory}
# The swarm's link names exactly these values: once it is out, changing one starts another swarm.
{more}
"""
_MORE = "# Settings that are not here have their defaults: p2ptrain init --all DIR writes all of them.\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write; made as needed")
    parser.add_argument("--all", action="store_true", help="write all settings, not only those that are often changed")
    parser.add_argument("--name", help="a name for the swarm")
    parser.add_argument(
        "--model", metavar="MODEL", help="begin with this pretrained model: its folder, or hub:OWNER/NAME"
    )
    parser.add_argument("--context", type=int, default=0, metavar="N", help="with --model: tokens of a sample")
    parser.add_argument(
        "--lora", metavar="LAYERS", help="freeze the model, and train adapters of these layers: q_proj,v_proj"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any other value, such as model.layers=6"
    )


def run(arguments: argparse.Namespace) -> int:
    from p2ptrain.cli.manifests import KEY_FILE, RUN_FILE, load_manifest, parse_settings, public_paths
    from p2ptrain.cli.toml import commented_toml
    from p2ptrain.network.identity import Identity
    from p2ptrain.signing import issuing_key

    directory: Path = arguments.directory
    given = parse_settings(arguments.set)
    is_masked = any(key.startswith("secure_aggregation.") for key in given)  # Then nobody can check a mean.
    overrides = {**({} if is_masked else AMONG_STRANGERS), **_of_model(arguments), **given}
    manifest = load_manifest(None, {**overrides, "name": arguments.name or overrides.get("name")})
    if manifest.in_stages:
        from p2ptrain.pipeline.plan import PipelinePlan

        PipelinePlan(manifest).units(0)  # Refuses settings that do not go together.
    run_file, key_file = directory / RUN_FILE, directory / KEY_FILE
    for path in (run_file, key_file):
        if path.exists():
            raise UsageError(f"{path} exists already and is not overwritten: choose another directory")
    directory.mkdir(parents=True, exist_ok=True)
    with Identity.create_or_load(key_file) as organizer:
        text = commented_toml(manifest, None if arguments.all else _is_written)
        header = _HEADER.format(directory=directory, more="" if arguments.all else _MORE)
        run_file.write_text(header + text, encoding="utf-8")
        issuer = issuing_key(organizer).public_key().public_bytes_raw().hex()
    print(f"wrote {run_file}\nwrote {key_file} (organizer {organizer.peer_id}, issuer key {issuer}; keep it private)")
    if manifest.model.weights.startswith("local:"):
        print(f"every peer needs a copy of {arguments.model}, and gives its folder with --weights DIR")
    for warning in public_paths(manifest):
        print(warning)
    print(f"next: edit {run_file}, then run: p2ptrain seed {shlex.quote(str(directory))}")
    return 0


def _is_written(key: str, value: Any, default: Any) -> bool:
    return key in COMMON or value != default


def _of_model(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of --model and --lora."""
    overrides: dict[str, Any] = {}
    if arguments.lora is not None:
        overrides |= {"lora.targets": arguments.lora.split(","), "training.every": 1}
    if arguments.model is None:
        if arguments.context:
            raise UsageError("--context goes with --model; else use --set model.context=N")
        return overrides
    from p2ptrain.cli.manifests import of_pretrained

    return overrides | of_pretrained(arguments.model, arguments.context)
