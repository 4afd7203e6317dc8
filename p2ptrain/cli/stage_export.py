"""Export of a model in stages: the stage checkpoints of its newest complete round, joined.

Torch takes seconds to import, so the functions that read a checkpoint import it themselves.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.cli.manifests import first_signed
from p2ptrain.cli.screen.bars import bars
from p2ptrain.errors import CheckpointError, ConfigError, IncompatibleError
from p2ptrain.manifest import SIGNED_FILE, Manifest
from p2ptrain.pipeline.checkpoints.join import Found, join
from p2ptrain.pipeline.checkpoints.saving import TIED_FOLDER, stage_folder
from p2ptrain.training.checkpoints.stage_list import read_stage_list

if TYPE_CHECKING:
    import torch

    from p2ptrain.training.checkpoints.files import CheckpointInfo, LoadedCheckpoint


def export_stages(paths: Sequence[Path], arguments: argparse.Namespace) -> tuple[Manifest, dict[str, CheckpointInfo]]:
    """Write the model of the newest complete round among stage checkpoints, and return where it is from.

    ``arguments`` are the command's. Returns the manifest, and the descriptions of the checkpoints by stage folder.

    Raises:
        CheckpointError: A checkpoint is missing or damaged, or does not match those of the other stages.
        ConfigError: The manifest is missing.
        IncompatibleError: The checkpoints are of another swarm or model.
    """
    from p2ptrain.pipeline.plan import PipelinePlan

    manifest, output = _manifest_in(arguments.path, arguments.manifest), arguments.output
    values, parts = read_stages(paths, manifest, arguments.by_round)
    with bars(f"writing {output}", ""):
        _write(values, manifest, output, arguments)
    use = f"; in Python: peft.PeftModel.from_pretrained(model, {str(output)!r})" if manifest.lora is not None else ""
    number = next(iter(parts.values())).head.round
    print(f"wrote {output}: round {number} of {PipelinePlan(manifest).num_stages} stages{use}")
    return manifest, parts


def read_stages(
    paths: Sequence[Path], manifest: Manifest, by_round: bool
) -> tuple[dict[str, torch.Tensor], dict[str, CheckpointInfo]]:
    """Return the newest complete round: values by parameter, checkpoints by folder; raises as `export_stages`."""
    from p2ptrain.pipeline.plan import PipelinePlan
    from p2ptrain.training.checkpoints.files import describe_checkpoint

    plan = PipelinePlan(manifest)
    units = {stage_folder(stage): plan.own(stage) for stage in range(plan.num_stages)}
    if plan.tied is not None:
        units[TIED_FOLDER] = plan.tied
    joined = join([found for each in paths if (found := _describe(each, manifest))], list(units), by_round)
    if not joined.is_complete:
        print(
            f"warning: only their round, {joined.round}, says that these checkpoints belong together", file=sys.stderr
        )
    values: dict[str, torch.Tensor] = {}
    parts: dict[str, CheckpointInfo] = {}
    for name, unit in units.items():
        checkpoint = _load_one(joined.paths[name])
        parts[name] = describe_checkpoint(checkpoint.path)
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
    return values, parts


def _write(values: dict[str, torch.Tensor], manifest: Manifest, output: Path, arguments: argparse.Namespace) -> None:
    from p2ptrain.models import build_model, export_hugging_face, export_tensors, has_hugging_face_form
    from p2ptrain.models.adapters import export_adapters
    from p2ptrain.models.pretrained import local_tokenizer

    if manifest.lora is not None:
        _, _, place = manifest.model.weights.partition(":")
        return export_adapters(values, manifest.model, manifest.lora, output, place.partition("@")[0] or None)
    if not has_hugging_face_form(manifest.model):
        return export_tensors(values, output)
    tokenizer = local_tokenizer(manifest, arguments.weights, arguments.allow_path or ())
    model = build_model(manifest.model)
    model.load_state_dict(values)
    export_hugging_face(model, manifest.model, output, tokenizer)


def _manifest_in(path: Path, given: Path | None) -> Manifest:
    """Return the manifest of ``given``, or else of the run directories in ``path``."""
    found = [given] if given is not None else [*path.glob(SIGNED_FILE), *path.glob(f"*/{SIGNED_FILE}")]
    manifest = first_signed([file for file in found if file.is_file()], None)
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
