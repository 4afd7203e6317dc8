"""The digests of all stages, in a file that makes one stage's checkpoint complete.

The file has a checksum and is renamed into the checkpoint's folder, so it is whole or absent. The stages' hosts report
the digests (`p2ptrain.pipeline.checkpoints.saving`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from p2ptrain.disk import replace_file
from p2ptrain.errors import CheckpointError, ResourceError
from p2ptrain.training.checkpoints.sealed_json import DAMAGE, seal, unseal

FORMAT = 1
STAGES_FILE = "stages.json"
MAX_LIST_BYTES = 1 << 20


@dataclass(frozen=True)
class StageList:
    """The states that make up one model.

    Attributes:
        swarm: The manifest's digest, 32 bytes.
        round: The round of the checkpoints.
        digests: Digest (32 bytes) of each stage's state, and of state shared by two stages, by folder name.
    """

    swarm: bytes
    round: int
    digests: Mapping[str, bytes] = field(hash=False)


def write_stage_list(folder: Path, listed: StageList) -> None:
    """Make the checkpoint in ``folder`` complete; raise `ResourceError`, with nothing changed, if that fails."""
    description = {
        "format": FORMAT,
        "swarm": listed.swarm.hex(),
        "round": listed.round,
        "digests": {name: digest.hex() for name, digest in listed.digests.items()},
    }
    try:
        replace_file(folder / STAGES_FILE, seal(description), synced=True)
    except OSError as error:
        raise ResourceError(f"cannot note in {folder} that it is complete: {error.strerror or error}") from error


def read_stage_list(folder: Path) -> StageList | None:
    """Return the list in a checkpoint's folder, or None; raise `CheckpointError` if it is damaged."""
    file = folder / STAGES_FILE
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_LIST_BYTES + 1)
        if len(data) > MAX_LIST_BYTES:
            raise ValueError("too large")
        description = unseal(data)
        if description["format"] != FORMAT:
            raise ValueError(f"it has format {description['format']}, this version reads {FORMAT}")
        digests = {str(name): bytes.fromhex(digest) for name, digest in description["digests"].items()}
        return StageList(bytes.fromhex(description["swarm"]), int(description["round"]), digests)
    except FileNotFoundError:
        return None
    except (OSError, *DAMAGE) as error:
        raise CheckpointError(f"{file} is damaged ({error}): delete it; the checkpoint itself is not") from error
