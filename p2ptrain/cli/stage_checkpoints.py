"""Stage checkpoints: assembles those of one round into a model."""

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
from p2ptrain.pipeline.checkpoints.join import Found, join
from p2ptrain.pipeline.checkpoints.saving import TIED_FOLDER, stage_folder
from p2ptrain.training.checkpoints.stage_list import read_stage_list

if TYPE_CHECKING:
    import torch

    from p2ptrain.manifest import Manifest
    from p2ptrain.training.checkpoints.files import LoadedCheckpoint

_FOLDER = re.compile(rf"stage-\d+|{TIED_FOLDER}")
_ROUND = re.compile(r"\d+-round-(\d+)")


def find_stage_checkpoints(path: Path) -> list[Path]:
    """Return the stage checkpoints in a run directory or in a folder of run directories, by folder, oldest first."""
    folders = [*path.glob("checkpoints/*"), *path.glob("*/checkpoints/*")]
    found = [entry for folder in folders if _FOLDER.fullmatch(folder.name) for entry in folder.iterdir()]
    return sorted(entry for entry in found if entry.is_dir() and _ROUND.fullmatch(entry.name))


def is_of_stage(path: Path) -> bool:
    return _FOLDER.fullmatch(path.parent.name) is not None


def export_stages(arguments: argparse.Namespace, paths: list[Path]) -> None:
    """Assemble the stage checkpoints of the newest complete round, and write the model.

    Args:
        arguments: Of ``p2ptrain checkpoint export``.
        paths: Result of `find_stage_checkpoints` for ``arguments.path``.

    Raises:
        CheckpointError: A stage is missing or damaged, or does not match the others.
        ConfigError: The manifest is missing.
        IncompatibleError: The checkpoints are of another swarm.
    """
    from p2ptrain.pipeline.plan import PipelinePlan

    manifest, output = _manifest(arguments.path, arguments.manifest), arguments.output
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
        _write(values, manifest, output, arguments.weights)
    print(f"wrote {output}: round {joined.round} of {plan.num_stages} stages{_use(manifest, output)}")


def _write(values: dict[str, torch.Tensor], manifest: Manifest, output: Path, weights: Path | None) -> None:
    from p2ptrain.models import build_model, export_hugging_face
    from p2ptrain.models.pretrained import local_data

    if manifest.lora is not None:
        from p2ptrain.models.adapters import export_adapters

        _, _, place = manifest.model.weights.partition(":")
        return export_adapters(values, manifest.model, manifest.lora, output, place.partition("@")[0] or None)
    tokenizer = local_data(manifest, weights).tokenizer
    model = build_model(manifest.model)
    model.load_state_dict(values)
    export_hugging_face(model, manifest.model, output, tokenizer)


def _use(manifest: Manifest, output: Path) -> str:
    if manifest.lora is None:
        return ""
    return f"; in Python: peft.PeftModel.from_pretrained(model, {str(output)!r})"


def completeness(path: Path, paths: list[Path]) -> str:
    """Return the end of a checkpoint's line: whether all stages are saved and present; empty without stages.

    Args:
        path: The checkpoint.
        paths: All checkpoints found with it.
    """
    if not is_of_stage(path):
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


def _manifest(path: Path, given: Path | None) -> Manifest:
    from p2ptrain.manifest import SIGNED_FILE, SignedManifest
    from p2ptrain.network.identity import Identity

    found = [given] if given is not None else [*path.glob(SIGNED_FILE), *path.glob(f"*/{SIGNED_FILE}")]
    with Identity.ephemeral() as verifier:
        for file in found:
            with contextlib.suppress(ManifestError, OSError):
                return SignedManifest.from_bytes(file.read_bytes(), None, verifier).manifest
    raise ConfigError(f"no {SIGNED_FILE} lies in {path}: give the swarm's with --manifest")
