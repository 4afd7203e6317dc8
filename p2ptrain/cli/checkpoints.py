"""The checkpoints at a path: found, listed, verified, and exported as a model.

Torch takes seconds to import, so the functions that read a checkpoint import it themselves.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.cli.manifests import first_signed
from p2ptrain.cli.screen.bars import bars
from p2ptrain.errors import CheckpointError, ConfigError, IncompatibleError
from p2ptrain.manifest import SIGNED_FILE, Manifest
from p2ptrain.pipeline.checkpoints.saving import TIED_FOLDER
from p2ptrain.status.formats import human_bytes, human_count
from p2ptrain.training.checkpoints.stage_list import read_stage_list

if TYPE_CHECKING:
    from torch import Tensor, nn

    from p2ptrain.training.checkpoints.files import CheckpointInfo, LoadedCheckpoint
    from p2ptrain.training.state.layout import Layout

_STAGE_FOLDER = re.compile(rf"stage-\d+|{TIED_FOLDER}")
_NAME = re.compile(r"\d+-round-\d+")


def find_checkpoints(path: Path) -> list[Path]:
    """Return the checkpoint at a path, or those in it or in its folder ``checkpoints``, oldest first.

    Includes torn and tampered checkpoints, so that ``verify`` finds them.

    Raises:
        CheckpointError: There is no checkpoint.
        ConfigError: The path does not exist.
    """
    if not path.exists():
        raise ConfigError(f"{path} is not there: give a peer's run directory, or a checkpoint's folder")
    from p2ptrain.training.checkpoints.files import DESCRIPTION_FILE

    if (path / DESCRIPTION_FILE).is_file():
        return [path]
    for folder in (path, path / "checkpoints"):
        if folder.is_dir() and (found := _checkpoints_in(folder)):
            return sorted(found, key=lambda entry: int(entry.name.partition("-")[0]))
    if of_stages := find_stage_checkpoints(path):
        return of_stages
    raise CheckpointError(f"there is no checkpoint in {path}: give a peer's run directory, or a checkpoint's folder")


def _checkpoints_in(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if entry.is_dir() and _NAME.fullmatch(entry.name)]


def find_stage_checkpoints(path: Path) -> list[Path]:
    """Return the stage checkpoints in a run directory or in a folder of run directories, by folder, oldest first."""
    folders = [*path.glob("checkpoints/*"), *path.glob("*/checkpoints/*")]
    of_stages = [folder for folder in folders if _STAGE_FOLDER.fullmatch(folder.name)]
    return sorted(entry for folder in of_stages for entry in _checkpoints_in(folder))


def _is_of_stage(path: Path) -> bool:
    return _STAGE_FOLDER.fullmatch(path.parent.name) is not None


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.name}" if _is_of_stage(path) else path.name


def verify(paths: Sequence[Path]) -> None:
    """Print a line for each checkpoint; raise `CheckpointError` at the first damaged one."""
    from p2ptrain.training.checkpoints.files import verify_checkpoint

    for path in paths:
        head = verify_checkpoint(path, bars).head
        print(f"{_name(path)}: intact, round {head.round}, digest {head.digest.hex()}{_completeness(path, paths)}")


def list_all(paths: Sequence[Path]) -> None:
    """Print a line for each checkpoint, damaged ones included."""
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
            f"  digest {head.digest.hex()[:8]}{_completeness(path, paths)}"
        )


def _completeness(path: Path, paths: Sequence[Path]) -> str:
    """Return the end of a checkpoint's line: whether all stages are saved and in ``paths``; empty without stages."""
    if not _is_of_stage(path):
        return ""
    try:
        listed = read_stage_list(path)
    except CheckpointError as error:
        return f"  {error}"
    if listed is None:
        return "  incomplete: what the other stages saved then is not known"
    there = {each.parent.name for each in paths if each.name.endswith(f"-round-{listed.round}")}
    absent = sorted(listed.digests.keys() - there, key=lambda name: (len(name), name))
    return "  complete" + (f"; not here: {', '.join(absent)}" if absent else "")


def export(path: Path, arguments: argparse.Namespace) -> tuple[Manifest, dict[str, CheckpointInfo]]:
    """Write the model of one checkpoint, and return its swarm's manifest and the checkpoint.

    ``arguments`` are the command's. The checkpoint stands under an empty name. A model that transformers does not know
    is written as tensors alone, with their names in the module.

    Raises:
        CheckpointError: It is damaged, or does not name the tensors.
        ConfigError: The manifest is missing.
        IncompatibleError: It is of another swarm or model.
    """
    from p2ptrain.models import export_hugging_face, export_tensors, has_hugging_face_form
    from p2ptrain.models.pretrained import local_tokenizer
    from p2ptrain.training.checkpoints.files import load_checkpoint
    from p2ptrain.training.checkpoints.saving import saved_layout

    checkpoint = load_checkpoint(path, bars)
    head, manifest, output = checkpoint.head, _manifest_of(checkpoint, arguments.manifest), arguments.output
    if has_hugging_face_form(manifest.model):
        model = _build(checkpoint, manifest)
        tokenizer = local_tokenizer(manifest, arguments.weights, arguments.allow_path or ())
        with bars(f"writing {output}", ""):
            export_hugging_face(model, manifest.model, output, tokenizer)
    else:
        export_tensors(_tensors(checkpoint, saved_layout(checkpoint)), output)
    print(f"wrote {output}: round {head.round}, digest {head.digest.hex()[:8]}")
    return manifest, {"": checkpoint}


def read_model(path: Path) -> nn.Module:
    """Return the model of one checkpoint; raises as `export`."""
    from p2ptrain.training.checkpoints.files import load_checkpoint

    checkpoint = load_checkpoint(path, bars)
    return _build(checkpoint, _manifest_of(checkpoint, None))


def _build(checkpoint: LoadedCheckpoint, manifest: Manifest) -> nn.Module:
    """Return the manifest's model with the values of a checkpoint."""
    from p2ptrain.models import build_model
    from p2ptrain.training.state.layout import Layout

    model = build_model(manifest.model)
    layout = Layout.from_module(model, "", manifest.private.personal if manifest.private else ())
    if checkpoint.tensors[0][1].shape != (layout.num_values,):
        raise IncompatibleError(f"{checkpoint.path} holds another model than its manifest names: give --manifest")
    model.load_state_dict(_tensors(checkpoint, layout), strict=False)  # A tied tensor has one of its names.
    return model


def _tensors(checkpoint: LoadedCheckpoint, layout: Layout) -> dict[str, Tensor]:
    try:
        return layout.tensors(checkpoint.tensors[0][1], checkpoint.local)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}: export another checkpoint of this site") from error


def _manifest_of(checkpoint: LoadedCheckpoint, given: Path | None) -> Manifest:
    """Return the manifest of the checkpoint's swarm, from ``given`` or from the folders above the checkpoint."""
    # The folder `checkpoints`, the peer's run directory, and the folder of a whole swarm or of an organizer.
    above = [folder / SIGNED_FILE for folder in list(checkpoint.path.absolute().parents)[:3]]
    found = [given] if given is not None else [file for file in above if file.is_file()]
    if not found:
        raise ConfigError(f"no {SIGNED_FILE} lies near {checkpoint.path}: give the swarm's with --manifest")
    try:
        manifest = first_signed(found, checkpoint.swarm)
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}; give the swarm's signed manifest with --manifest"
        ) from error
    if manifest is None:
        raise ConfigError(
            f"{found[0]} is not the signed manifest of the swarm that {checkpoint.path} is from: give its"
            f" {SIGNED_FILE}, as 'p2ptrain seed' writes it, with --manifest"
        )
    return manifest
