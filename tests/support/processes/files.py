"""Files of peers that commands run: manifests and role files before, metrics and checkpoints afterwards."""

import json
from pathlib import Path
from typing import Any

from p2ptrain.manifest import Manifest, SignedManifest
from p2ptrain.network.identity import Identity

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
TINY = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 2, "intermediate": 64, "context": 32}
"""A model that learns within seconds."""
QUICK = {"grace_seconds": 2.0, "matchmaking_seconds": 10.0, "round_seconds": 15.0}
"""Short deadlines."""
OPEN_TO_ALL = {"mode": "open", "puzzle_bits": 0}
"""``admission`` of swarms whose peers come with a link, and whose organizer is none of them."""
SENTENCE = "the quick brown fox jumps over the lazy dog. "


def write_text(path: Path, repeats: int = 2000) -> Path:
    path.write_text(SENTENCE * repeats)
    return path


def set_options(**sections: Any) -> list[str]:
    """Return options of a command for these settings: values of sections, or of the whole."""
    values = {
        name if key is None else f"{name}.{key}": value
        for name, section in sections.items()
        for key, value in (section.items() if isinstance(section, dict) else [(None, section)])
    }
    return [f"--set={key}={value}" for key, value in values.items()]


def write_manifest(path: Path, **sections: Any) -> Manifest:
    """Write the signed manifest of a swarm that is open to all."""
    sections = {"admission": OPEN_TO_ALL, **sections}
    with Identity.ephemeral() as organizer:
        signed = SignedManifest.create(Manifest.model_validate(sections), organizer)
    path.write_bytes(signed.to_bytes())
    return signed.manifest


def write_role(path: Path, role: str, **values: Any) -> Path:
    """Write the role file of a peer on loopback whose run directory is named like the file, with the text beside it.

    Sections are dicts, and replace those by default.
    """
    usual = {"network": {"listen": [LOOPBACK]}, "resources": {"device": "cpu", "threads": 1}}
    found = {"role": role, "name": path.stem, "run_dir": path.stem, "allow_path": ["."], **usual, **values}
    lines = [f"{key} = {json.dumps(value)}" for key, value in found.items() if not isinstance(value, dict)]
    for name, section in found.items():
        if isinstance(section, dict):
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return what a trainer has measured over all of its starts, oldest first; without a line that is being written."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def committed(run_dir: Path) -> list[dict[str, Any]]:
    return [values for values in metrics(run_dir) if values.get("committed")]


def last_round(run_dir: Path) -> int:
    """Return the latest round that a trainer committed; -1 before the first."""
    return max((values["round"] for values in committed(run_dir)), default=-1)


def checkpoints(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob("[0-9]*-round-*"))


def round_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
