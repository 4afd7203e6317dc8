"""The checkpoints at a path: found, listed, verified, and exported as a model, which those of stages form together.

Torch takes seconds to import, so the functions that read a checkpoint import it themselves.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.cli.screen.bars import bars
from p2ptrain.errors import CheckpointError, ConfigError, IncompatibleError, ManifestError
from p2ptrain.manifest import SIGNED_FILE, Manifest, SignedManifest
from p2ptrain.network.identity import Identity
from p2ptrain.pipeline.checkpoints.join import Found, join
from p2ptrain.pipeline.checkpoints.saving import TIED_FOLDER, stage_folder
from p2ptrain.status.formats import human_bytes, human_count
from p2ptrain.training.checkpoints.stage_list import read_stage_list

if TYPE_CHECKING:
    import torch

    from p2ptrain.training.checkpoints.files import LoadedCheckpoint

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
    if of_stages := _find_stage_checkpoints(path):
        return of_stages
    raise CheckpointError(f"there is no checkpoint in {path}: give a peer's run directory, or a checkpoint's folder")


def _checkpoints_in(folder: Path) -> list[Path]:
    return [entry for entry in folder.iterdir() if entry.is_dir() and _NAME.fullmatch(entry.name)]


def _find_stage_checkpoints(path: Path) -> list[Path]:
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


def export(arguments: argparse.Namespace, paths: Sequence[Path]) -> None:
    """Write the newest model in ``paths``, the result of `find_checkpoints`; ``arguments`` are the command's.

    Raises:
        CheckpointError: A checkpoint is missing or damaged, or does not match those of the other stages.
        ConfigError: The manifest is missing.
        IncompatibleError: The checkpoints are of another swarm or model.
    """
    if _find_stage_checkpoints(arguments.path):
        _export_stages(arguments, paths)
    else:
        _export_whole(arguments, paths[-1])


def _export_whole(arguments: argparse.Namespace, path: Path) -> None:
    from p2ptrain.models import build_model, export_hugging_face
    from p2ptrain.models.pretrained import local_data
    from p2ptrain.training.checkpoints.files import load_checkpoint
    from p2ptrain.training.state.layout import Layout

    checkpoint, output = load_checkpoint(path, bars), arguments.output
    manifest = _manifest_of(checkpoint, arguments.manifest)
    tokenizer = local_data(manifest, arguments.weights).tokenizer
    model = build_model(manifest.model)
    layout = Layout.from_module(model)
    vector = checkpoint.tensors[0][1]
    if vector.shape != (layout.num_values,):
        raise IncompatibleError(f"{path} holds another model than its manifest names: give --manifest")
    layout.write(vector, model)
    with bars(f"writing {output}", ""):
        export_hugging_face(model, manifest.model, output, tokenizer)
    print(f"wrote {output}: round {checkpoint.head.round}, digest {checkpoint.head.digest.hex()[:8]}")


def _manifest_of(checkpoint: LoadedCheckpoint, given: Path | None) -> Manifest:
    """Return the manifest of the checkpoint's swarm, from ``given`` or from the folders above the checkpoint."""
    # The folder `checkpoints`, the peer's run directory, and the folder of a whole swarm or of an organizer.
    above = [folder / SIGNED_FILE for folder in list(checkpoint.path.absolute().parents)[:3]]
    found = [given] if given is not None else [file for file in above if file.is_file()]
    if not found:
        raise ConfigError(f"no {SIGNED_FILE} lies near {checkpoint.path}: give the swarm's with --manifest")
    try:
        manifest = _first_valid(found, checkpoint.swarm)
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


def _first_valid(files: Sequence[Path], digest: bytes | None) -> Manifest | None:
    """Return the first valid manifest with ``digest``, if given; raise `OSError` if a file cannot be read."""
    with Identity.ephemeral() as verifier:
        for file in files:
            with contextlib.suppress(ManifestError):
                return SignedManifest.from_bytes(file.read_bytes(), digest, verifier).manifest
    return None


def _export_stages(arguments: argparse.Namespace, paths: Sequence[Path]) -> None:
    """Assemble the stage checkpoints of the newest complete round, and write the model."""
    from p2ptrain.pipeline.plan import PipelinePlan

    manifest, output = _manifest_in(arguments.path, arguments.manifest), arguments.output
    plan = PipelinePlan(manifest)
    units = {stage_folder(stage): plan.own(stage) for stage in range(plan.num_stages)}
    if plan.tied is not None:
        units[TIED_FOLDER] = plan.tied
    joined = join([found for each in paths if (found := _describe(each, manifest))], list(units), arguments.by_round)
    if not joined.is_complete:
        print(
            f"warning: only their round, {joined.round}, says that these checkpoints belong together", file=sys.stderr
        )
    values: dict[str, torch.Tensor] = {}
    for name, unit in units.items():
        checkpoint = _load_one(joined.paths[name])
        if checkpoint.swarm != plan.swarm_of(unit.number):
            raise IncompatibleError(f"{checkpoint.path} is not of the swarm that the manifest describes")
        shapes = plan.shapes(unit)
        sizes, vector = [math.prod(shape) for shape in shapes.values()], checkpoint.tensors[0][1]
        if sizes and vector.shape != (sum(sizes),):
            raise IncompatibleError(f"{checkpoint.path} is of another span than {name} has now")
        offset = 0
        for (parameter, shape), size in zip(shapes.items(), sizes, strict=True):
            values[parameter] = vector[offset : offset + size].view(shape)
            offset += size
    with bars(f"writing {output}", ""):
        _write_stages(values, manifest, output, arguments.weights)
    use = f"; in Python: peft.PeftModel.from_pretrained(model, {str(output)!r})" if manifest.lora is not None else ""
    print(f"wrote {output}: round {joined.round} of {plan.num_stages} stages{use}")


def _write_stages(values: dict[str, torch.Tensor], manifest: Manifest, output: Path, weights: Path | None) -> None:
    from p2ptrain.models import build_model, export_hugging_face
    from p2ptrain.models.adapters import export_adapters
    from p2ptrain.models.pretrained import local_data

    if manifest.lora is not None:
        _, _, place = manifest.model.weights.partition(":")
        return export_adapters(values, manifest.model, manifest.lora, output, place.partition("@")[0] or None)
    tokenizer = local_data(manifest, weights).tokenizer
    model = build_model(manifest.model)
    model.load_state_dict(values)
    export_hugging_face(model, manifest.model, output, tokenizer)


def _manifest_in(path: Path, given: Path | None) -> Manifest:
    """Return the manifest of ``given``, or else of the run directories in ``path``."""
    found = [given] if given is not None else [*path.glob(SIGNED_FILE), *path.glob(f"*/{SIGNED_FILE}")]
    manifest = _first_valid([file for file in found if file.is_file()], None)
    if manifest is None:
        raise ConfigError(f"no {SIGNED_FILE} lies in {path}: give the swarm's with --manifest")
    return manifest


def _describe(path: Path, manifest: Manifest) -> Found | None:
    """Return a checkpoint's description; None, with a line on standard error, if it is damaged."""
    from p2ptrain.training.checkpoints.files import describe_checkpoint

    listed = None
    try:
        info = describe_checkpoint(path)
    except CheckpointError as error:
        print(f"skipped: {error}", file=sys.stderr)
        return None
    try:
        listed = read_stage_list(path)
    except CheckpointError as error:
        print(f"note: {error}", file=sys.stderr)
    is_ours = listed is not None and listed.swarm == manifest.digest and listed.round == info.head.round
    return Found(path.parent.name, path, info.head.round, info.head.digest, listed if is_ours else None)


def _load_one(paths: Sequence[Path]) -> LoadedCheckpoint:
    """Return the first intact copy of a checkpoint."""
    from p2ptrain.training.checkpoints.files import load_checkpoint

    for path in paths[:-1]:
        try:
            return load_checkpoint(path, bars)
        except CheckpointError as error:
            print(f"skipped: {error}", file=sys.stderr)
    return load_checkpoint(paths[-1], bars)
