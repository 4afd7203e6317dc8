"""Checkpoints of stages: those of one round, put together, are the model's."""

from __future__ import annotations

import contextlib
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.cli.bars import bars
from p2ptrain.errors import CheckpointError, ConfigError, IncompatibleError, ManifestError
from p2ptrain.pipeline.folders import TIED_FOLDER, stage_folder

if TYPE_CHECKING:
    import torch

    from p2ptrain.manifest import Manifest

_FOLDER = re.compile(rf"stage-\d+|{TIED_FOLDER}")
_ROUND = re.compile(r"\d+-round-(\d+)")


def find_stage_checkpoints(path: Path) -> list[Path]:
    """Checkpoints of stages in a peer's run directory, or in the folder of several; by folder, oldest first."""
    folders = [*path.glob("checkpoints/*"), *path.glob("*/checkpoints/*")]
    found = [entry for folder in folders if _FOLDER.fullmatch(folder.name) for entry in folder.iterdir()]
    return sorted(entry for entry in found if entry.is_dir() and _ROUND.fullmatch(entry.name))


def is_of_stage(path: Path) -> bool:
    """Whether a checkpoint is one of a stage, by where it is."""
    return _FOLDER.fullmatch(path.parent.name) is not None


def export_stages(path: Path, paths: list[Path], given: Path | None, output: Path) -> None:
    """Put the checkpoints of the newest round that all stages have together, and write the model.

    Args:
        path: What the user named, for messages and to look for the manifest.
        paths: What `find_stage_checkpoints` found there.
        given: The swarm's signed manifest; None to look for it.
        output: The folder to write.

    Raises:
        CheckpointError: A stage is missing, or one of them is damaged.
        ConfigError: The manifest is not there.
        IncompatibleError: The checkpoints are another swarm's than the manifest's.
    """
    from p2ptrain.pipeline.plan import PipelinePlan
    from p2ptrain.training.checkpoint import load_checkpoint

    manifest = _manifest(path, given)
    plan = PipelinePlan(manifest)
    units = {stage_folder(stage): plan.own(stage) for stage in range(plan.num_stages)}
    if plan.tied is not None:
        units[TIED_FOLDER] = plan.tied
    rounds: dict[int, dict[str, Path]] = defaultdict(dict)
    for each in paths:
        match = _ROUND.fullmatch(each.name)
        if match is not None:
            rounds[int(match[1])][each.parent.name] = each
    whole = [round for round, found in rounds.items() if units.keys() <= found.keys()]
    if not whole:
        there = {name for found in rounds.values() for name in found}
        missing = ", ".join(name for name in units if name not in there) or "one round that all of them have"
        raise CheckpointError(
            f"{path} has no checkpoints of all {plan.num_stages} stages of one round (missing: {missing}): put the run"
            " directories of a host of each stage into one folder, and give that"
        )
    values: dict[str, torch.Tensor] = {}
    for name, unit in units.items():
        checkpoint = load_checkpoint(rounds[max(whole)][name], bars)
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
        _write(values, manifest, output)
    print(f"wrote {output}: round {max(whole)} of {plan.num_stages} stages{_use(manifest, output)}")


def _write(values: dict[str, torch.Tensor], manifest: Manifest, output: Path) -> None:
    from p2ptrain.models import build_model, export_hugging_face

    if manifest.lora is not None:
        from p2ptrain.models.adapters import export_adapters

        _, _, place = manifest.model.weights.partition(":")
        return export_adapters(values, manifest.model, manifest.lora, output, place.partition("@")[0] or None)
    model = build_model(manifest.model)
    model.load_state_dict(values)
    export_hugging_face(model, manifest.model, output, manifest.data.tokenizer)


def _use(manifest: Manifest, output: Path) -> str:
    if manifest.lora is None:
        return ""
    return f"; in Python: peft.PeftModel.from_pretrained(model, {str(output)!r})"


def _manifest(path: Path, given: Path | None) -> Manifest:
    import tempfile

    from p2ptrain.manifest import SIGNED_FILE, SignedManifest
    from p2ptrain.network.identity import Identity

    found = [given] if given is not None else [*path.glob(SIGNED_FILE), *path.glob(f"*/{SIGNED_FILE}")]
    with tempfile.TemporaryDirectory(prefix="p2ptrain-export-") as folder, Identity.ephemeral(folder) as verifier:
        for file in found:
            with contextlib.suppress(ManifestError, OSError):
                return SignedManifest.from_bytes(file.read_bytes(), None, verifier).manifest
    raise ConfigError(f"no {SIGNED_FILE} lies in {path}: give the swarm's with --manifest")
