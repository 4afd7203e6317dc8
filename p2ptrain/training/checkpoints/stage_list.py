"""The list of all stages' digests that makes a checkpoint of one stage complete: a file in the checkpoint's folder.

It is written beside the checkpoint's own files and renamed, so it is whole or not there; it has a checksum of itself.
What it says of the other stages is what their hosts said when it was written
(`p2ptrain.pipeline.checkpoints.saving`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p2ptrain.errors import CheckpointError, ResourceError

FORMAT = 1
STAGES_FILE = "stages.json"
MAX_LIST_BYTES = 1 << 20


@dataclass(frozen=True)
class StageList:
    """Which states are one model's.

    Attributes:
        swarm: The manifest's digest, 32 bytes.
        round: At which they were saved.
        digests: Of the state of each stage, and of what two of them share, 32 bytes; by the name of its folder.
    """

    swarm: bytes
    round: int
    digests: Mapping[str, bytes] = field(hash=False)


def write_stage_list(folder: Path, listed: StageList) -> None:
    """Make the checkpoint in ``folder`` complete.

    Raises:
        ResourceError: The disk is full or cannot be written, or the checkpoint is gone; nothing else has changed.
    """
    description = {
        "format": FORMAT,
        "swarm": listed.swarm.hex(),
        "round": listed.round,
        "digests": {name: digest.hex() for name, digest in listed.digests.items()},
    }
    unfinished = folder / f".{STAGES_FILE}"
    try:
        try:
            with unfinished.open("wb") as file:
                file.write(_canonical({**description, "checksum": _checksum(description)}))
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(folder / STAGES_FILE)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ResourceError(f"cannot note in {folder} that it is complete: {error.strerror or error}") from error


def read_stage_list(folder: Path) -> StageList | None:
    """The list in a checkpoint's folder; None where there is none.

    Raises:
        CheckpointError: It is damaged.
    """
    file = folder / STAGES_FILE
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_LIST_BYTES + 1)
        if len(data) > MAX_LIST_BYTES:
            raise ValueError("too large")
        description = json.loads(data)
        checksum = description.pop("checksum")
        if checksum != _checksum(description) or data != _canonical({**description, "checksum": checksum}):
            raise ValueError("its checksum is wrong")
        if description["format"] != FORMAT:
            raise ValueError(f"it has format {description['format']}, this version reads {FORMAT}")
        digests = {str(name): bytes.fromhex(digest) for name, digest in description["digests"].items()}
        return StageList(bytes.fromhex(description["swarm"]), int(description["round"]), digests)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged ({error}): delete it; the checkpoint itself is not") from error


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1).encode() + b"\n"


def _checksum(description: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(description)).hexdigest()
