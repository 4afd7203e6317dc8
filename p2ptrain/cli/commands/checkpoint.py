"""``p2ptrain checkpoint ls|verify|export``

Look after the checkpoints of a peer. A path is a checkpoint's folder, a folder of checkpoints, or a peer's run
directory; where one checkpoint is needed, the newest is taken. 'export' writes a Hugging Face folder that
from_pretrained loads. Of a model in stages it takes a folder with the run directories of a host of each stage, and the
newest round that is complete: of which a host heard that all stages had saved it, and with which digests.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.cli.screen.bars import bars
from p2ptrain.errors import CheckpointError, ConfigError, ManifestError, UsageError

if TYPE_CHECKING:
    from p2ptrain.manifest import Manifest
    from p2ptrain.training.checkpoints.files import LoadedCheckpoint

_NAME = re.compile(r"\d+-round-\d+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("ls", "verify", "export"), help="what to do")
    parser.add_argument("path", type=Path, metavar="PATH", help="a checkpoint, or a folder that holds checkpoints")
    parser.add_argument("output", type=Path, nargs="?", metavar="OUTPUT", help="export: the folder to write")
    parser.add_argument(
        "--manifest", type=Path, metavar="FILE", help="export: the signed manifest (default: manifest.bin nearby)"
    )
    parser.add_argument(
        "--weights", type=Path, metavar="DIR", help="export: the pretrained model, if the swarm takes its tokenizer"
    )
    parser.add_argument(
        "--by-round", action="store_true",
        help="export: join stages of one round though no host heard that all had saved it (the run ended before)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    if (arguments.action == "export") != (arguments.output is not None):
        raise UsageError("'export' takes PATH and OUTPUT, the others PATH alone; see 'p2ptrain checkpoint --help'")
    paths = find_checkpoints(arguments.path)
    from p2ptrain.cli.stage_checkpoints import completeness, export_stages, find_stage_checkpoints
    from p2ptrain.training.checkpoints.files import load_checkpoint, verify_checkpoint

    if arguments.action == "export" and find_stage_checkpoints(arguments.path):
        export_stages(arguments, paths)
    elif arguments.action == "export":
        loaded = load_checkpoint(paths[-1], bars)
        _export(loaded, _find_manifest(loaded, arguments.manifest), arguments.output, arguments.weights)
    elif arguments.action == "verify":
        for path in paths:
            head = verify_checkpoint(path, bars).head
            print(f"{_name(path)}: intact, round {head.round}, digest {head.digest.hex()}{completeness(path, paths)}")
    else:
        _list(paths)
    return 0


def find_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoint at a path, or those in it or in its folder ``checkpoints``, oldest first.

    Includes torn and tampered checkpoints, so that ``verify`` finds them.

    Raises:
        CheckpointError: There is no checkpoint.
        ConfigError: The path does not exist.
    """
    if not path.exists():
        raise ConfigError(f"{path} is not there: give a peer's run directory, or a checkpoint's folder")
    from p2ptrain.cli.stage_checkpoints import find_stage_checkpoints
    from p2ptrain.training.checkpoints.files import DESCRIPTION_FILE

    if (path / DESCRIPTION_FILE).is_file():
        return [path]
    for folder in (path, path / "checkpoints"):
        if folder.is_dir():
            found = [entry for entry in folder.iterdir() if entry.is_dir() and _NAME.fullmatch(entry.name)]
            if found:
                return sorted(found, key=lambda entry: int(entry.name.partition("-")[0]))
    if of_stages := find_stage_checkpoints(path):
        return of_stages
    raise CheckpointError(f"there is no checkpoint in {path}: give a peer's run directory, or a checkpoint's folder")


def _name(path: Path) -> str:
    from p2ptrain.cli.stage_checkpoints import is_of_stage

    return f"{path.parent.name}/{path.name}" if is_of_stage(path) else path.name


def _list(paths: list[Path]) -> None:
    from p2ptrain.cli.stage_checkpoints import completeness
    from p2ptrain.status.formats import human_bytes, human_count
    from p2ptrain.training.checkpoints.files import verify_checkpoint

    for path in paths:
        try:
            info = verify_checkpoint(path, bars)
        except CheckpointError as error:
            print(f"{_name(path)}  damaged: {error}")
            continue
        head = info.head
        print(
            f"{_name(path)}  round {head.round}  {human_count(head.tokens)} tokens  {human_bytes(info.num_bytes)}"
            f"  digest {head.digest.hex()[:8]}{completeness(path, paths)}"
        )


def _find_manifest(checkpoint: LoadedCheckpoint, given: Path | None) -> Manifest:
    """Return the manifest of the checkpoint's swarm, from ``given`` or from the folders above the checkpoint."""
    from p2ptrain.manifest import SIGNED_FILE, SignedManifest
    from p2ptrain.network.identity import Identity

    # The folder `checkpoints`, the peer's run directory, and the folder of a whole swarm or of an organizer.
    above = [folder / SIGNED_FILE for folder in list(checkpoint.path.absolute().parents)[:3]]
    found = [given] if given is not None else [file for file in above if file.is_file()]
    if not found:
        raise ConfigError(f"no {SIGNED_FILE} lies near {checkpoint.path}: give the swarm's with --manifest")
    with Identity.ephemeral() as verifier:
        for path in found:
            with contextlib.suppress(ManifestError):
                return SignedManifest.from_bytes(_read(path), checkpoint.swarm, verifier).manifest
    raise ConfigError(
        f"{found[0]} is not the signed manifest of the swarm that {checkpoint.path} is from: give its {SIGNED_FILE},"
        " as 'p2ptrain seed' writes it, with --manifest"
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give the swarm's signed manifest with --manifest") from error


def _export(checkpoint: LoadedCheckpoint, manifest: Manifest, output: Path, weights: Path | None) -> None:
    from p2ptrain.errors import IncompatibleError
    from p2ptrain.models import build_model, export_hugging_face
    from p2ptrain.models.pretrained import local_data
    from p2ptrain.training.state.layout import Layout

    tokenizer = local_data(manifest, weights).tokenizer
    model = build_model(manifest.model)
    layout = Layout.from_module(model)
    vector = checkpoint.tensors[0][1]
    if vector.shape != (layout.num_values,):
        raise IncompatibleError(f"{checkpoint.path} holds another model than its manifest names: give --manifest")
    layout.write(vector, model)
    with bars(f"writing {output}", ""):
        export_hugging_face(model, manifest.model, output, tokenizer)
    print(f"wrote {output}: round {checkpoint.head.round}, digest {checkpoint.head.digest.hex()[:8]}")
