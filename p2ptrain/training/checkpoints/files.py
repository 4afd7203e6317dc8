"""Checkpoints on disk, written atomically.

A checkpoint is a folder, ``000042-round-1337``: the first number counts saves, so the largest is the newest. In it::

    shared.safetensors    the shared state, whose digest the head names
    local.safetensors     the peer's own tensors: inner optimizer, residual
    checkpoint.json       format, swarm, head, SHA-256 and size of the other files, a checksum of itself; canonical JSON
    stages.json           in a complete checkpoint of a stage: all stages' digests (`stage_list.py`)

It is written in a hidden folder, synced to disk, and renamed. A crash leaves earlier checkpoints intact, and a hidden
folder that the next save or start removes. A lock file protects the hidden folder of a process that is still writing.
Tensors are written one by one from live memory, without a second copy.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.averaging.protocol.table import Table
from p2ptrain.disk import replace_file, sync_folder
from p2ptrain.errors import CheckpointError, IncompatibleError, IntegrityError, ResourceError
from p2ptrain.network.schema import from_bytes, from_wire, to_bytes, to_wire
from p2ptrain.progress import Progress, no_progress
from p2ptrain.training.checkpoints.sealed_json import DAMAGE, seal, unseal
from p2ptrain.training.checkpoints.stage_list import STAGES_FILE
from p2ptrain.training.checkpoints.tensor_file import hash_file, write_tensors
from p2ptrain.training.state.digest import NamedTensors, merkle_tree

logger = logging.getLogger(__name__)

FORMAT = 2
SHARED_FILE = "shared.safetensors"
LOCAL_FILE = "local.safetensors"
DESCRIPTION_FILE = "checkpoint.json"
LOCK_FILE = ".lock"

MAX_DESCRIPTION_BYTES = 64 << 20
SPARE_BYTES = 16 << 20

_NAME = re.compile(r"(\d{6,})-round-\d+")
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class CheckpointInfo:
    """The description of a checkpoint, whose other files are not verified yet.

    Attributes:
        swarm: The manifest's digest, 32 bytes.
        files: SHA-256 and size of its tensor files, by name.
        num_bytes: Size of its tensor files.
        extra: The plain values saved with it.
    """

    path: Path
    head: Head
    swarm: bytes
    files: dict[str, dict[str, Any]]
    num_bytes: int
    extra: dict[str, Any]


@dataclass(frozen=True)
class LoadedCheckpoint(CheckpointInfo):
    """A checkpoint with every byte verified.

    ``tensors`` is the shared state, for `SharedState.replace`. ``local`` holds this peer's own tensors, on the CPU.
    """

    tensors: list[tuple[str, Tensor]]
    local: dict[str, Tensor]


def save_checkpoint(
    directory: Path,
    *,
    head: Head,
    tensors: NamedTensors,
    local: dict[str, Tensor],
    extra: dict[str, Any],
    swarm: bytes,
    keep_last: int,
) -> Path:
    """Write a checkpoint atomically, and delete the oldest beyond ``keep_last``; return its folder.

    Call it on the training thread: nothing may change the tensors meanwhile. A change is detected, and nothing is
    saved. ``tensors`` are the shared state, with the digest of ``head``; ``local`` are this peer's own, on any device;
    ``extra`` holds what JSON can hold.

    Raises:
        ResourceError: The disk is full or cannot be written; earlier checkpoints are intact.
        CheckpointError: The shared state does not have the digest of ``head``, or a tensor changed meanwhile.
        ValueError: ``extra`` is not plain.
    """
    try:
        extra = json.loads(json.dumps(extra))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"extra must hold what JSON can hold: {error}") from error
    num_bytes = sum(tensor.nbytes for tensor in [*(tensor for _, tensor in tensors), *local.values()])
    versions = _versions(tensors, local)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory):
            _remove_unfinished(directory)
            _check_room(directory, num_bytes)
            number = 1 + max((_number(path) for path in _folders(directory)), default=0)
            path = directory / f"{number:06d}-round-{head.round}"
            unfinished = directory / f"{_UNFINISHED}{path.name}"
            try:
                unfinished.mkdir()
                _write_files(unfinished, head, tensors, local, extra, swarm)
                if _versions(tensors, local) != versions:
                    raise CheckpointError("a tensor changed while it was saved: save on the thread that trains")
                unfinished.rename(path)
            except BaseException:
                shutil.rmtree(unfinished, ignore_errors=True)
                raise
            sync_folder(directory)
            _prune(directory, keep_last)
    except OSError as error:
        raise ResourceError(
            f"cannot save a checkpoint of {num_bytes >> 20} MiB in {directory}: {error.strerror or error};"
            " earlier checkpoints are intact: free some space or choose another directory"
        ) from error
    return path


def verify_checkpoint(path: Path, jobs: Progress = no_progress) -> CheckpointInfo:
    """Check every byte of a checkpoint; raise `CheckpointError` if something is missing or changed."""
    info = describe_checkpoint(path)
    checked = 0
    with jobs(f"checking {path.name}") as advance:

        def on_bytes(count: int) -> None:
            nonlocal checked
            checked += count
            advance(checked, info.num_bytes)

        for name, described in info.files.items():
            _check_file(path / name, described, on_bytes)
    return info


def load_checkpoint(path: Path, jobs: Progress = no_progress) -> LoadedCheckpoint:
    """Verify a checkpoint and read it; raise `CheckpointError` if a file or the shared state's digest is wrong."""
    info = verify_checkpoint(path, jobs)
    with jobs(f"reading {path.name}", ""):
        shared = _read_tensors(path / SHARED_FILE)
        local = dict(_read_tensors(path / LOCAL_FILE))
        is_right = merkle_tree(shared).root == info.head.digest
    if not is_right:
        raise CheckpointError(f"{path / SHARED_FILE} has not the digest of its round: {_ADVICE}")
    return LoadedCheckpoint(**vars(info), tensors=shared, local=local)


def load_newest_valid(directory: Path, swarm: bytes, jobs: Progress = no_progress) -> LoadedCheckpoint | None:
    """Load the newest intact checkpoint, and clean up after a crash; return None if there is no checkpoint.

    Raises:
        CheckpointError: There are checkpoints, and none is intact.
        IncompatibleError: The readable checkpoints belong to other swarms than ``swarm``, the manifest's digest.
    """
    _clean_up(directory)
    folders = _folders(directory)
    foreign = 0
    for path in reversed(folders):
        try:
            if describe_checkpoint(path).swarm != swarm:
                foreign += 1
                continue
            return load_checkpoint(path, jobs)
        except CheckpointError as error:
            logger.warning("skipped a checkpoint: %s", error)
    if foreign:
        raise IncompatibleError(f"the checkpoints in {directory} belong to another swarm: choose another directory")
    if folders:
        raise CheckpointError(
            f"none of the {len(folders)} checkpoints in {directory} is whole:"
            " restore them from a backup, or move the directory away to begin anew"
        )
    return None


_ADVICE = "delete this checkpoint; the one before it will be used"


def _write_files(
    folder: Path, head: Head, tensors: NamedTensors, local: dict[str, Tensor], extra: dict[str, Any], swarm: bytes
) -> None:
    files = {
        SHARED_FILE: write_tensors(folder / SHARED_FILE, tensors),
        LOCAL_FILE: write_tensors(folder / LOCAL_FILE, list(local.items())),
    }
    # Hashed after the write, so that the hash detects changes during the write.
    if merkle_tree(tensors).root != head.digest:
        raise CheckpointError("the shared state has not the digest of its round: nothing was saved; re-sync first")
    values = to_wire(head) | {"table": to_bytes(head.table)}
    description = {
        "format": FORMAT,
        "swarm": swarm.hex(),
        "head": {key: value.hex() if isinstance(value, bytes) else value for key, value in values.items()},
        "files": {name: {"sha256": written.sha256, "bytes": written.num_bytes} for name, written in files.items()},
        "extra": extra,
    }
    replace_file(folder / DESCRIPTION_FILE, seal(description), synced=True)  # The last one: it syncs the folder.


def describe_checkpoint(path: Path) -> CheckpointInfo:
    """Return a checkpoint's description alone; raise `CheckpointError` if it is missing or damaged."""
    file = path / DESCRIPTION_FILE
    try:
        if file.stat().st_size > MAX_DESCRIPTION_BYTES:
            raise ValueError("too large")
        description = unseal(file.read_bytes())
        if description["format"] != FORMAT:
            raise CheckpointError(
                f"{file} has format {description['format']}, this version reads {FORMAT}: use the version that wrote it"
            )
        values = description["head"]
        for key in ("lineage", "digest", "certificate", "table"):
            values[key] = bytes.fromhex(values[key])
        table = from_bytes(Table, values.pop("table"))
        head = replace(from_wire(Head, values), table=table)
        files: dict[str, dict[str, Any]] = description["files"]
        if set(files) != {SHARED_FILE, LOCAL_FILE}:
            raise ValueError("it does not list the right files")
        num_bytes = sum(described["bytes"] for described in files.values())
        swarm = bytes.fromhex(description["swarm"])
        return CheckpointInfo(path, head, swarm, files, num_bytes, description["extra"])
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror or error}): {_ADVICE}") from error
    except CheckpointError:
        raise
    except (*DAMAGE, IntegrityError) as error:
        raise CheckpointError(f"{file} is damaged ({error}): {_ADVICE}") from error


def _check_file(file: Path, described: dict[str, Any], on_bytes: Callable[[int], None]) -> None:
    try:
        found = hash_file(file, on_bytes)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror or error}): {_ADVICE}") from error
    if found.num_bytes != described["bytes"]:
        raise CheckpointError(f"{file} has {found.num_bytes} bytes, not {described['bytes']}: {_ADVICE}")
    if found.sha256 != described["sha256"]:
        raise CheckpointError(f"{file} was changed after it was written: {_ADVICE}")


def _read_tensors(file: Path) -> list[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            order = json.loads((opened.metadata() or {}).get("order", "[]"))
            return [(name, opened.get_tensor(name).clone()) for name in order]
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}): {_ADVICE}") from error


def _versions(tensors: NamedTensors, local: dict[str, Tensor]) -> list[tuple[str, int]]:
    """Return torch's counters of in-place changes; equal lists mean that no tensor changed."""
    return [(name, tensor._version) for name, tensor in [*tensors, *local.items()] if not tensor.is_inference()]


# Folders


def _folders(directory: Path) -> list[Path]:
    try:
        paths = [path for path in directory.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except FileNotFoundError:
        return []
    return sorted(paths, key=_number)


def _number(path: Path) -> int:
    return int(path.name.split("-", 1)[0])


def _prune(directory: Path, keep_last: int) -> None:
    """Delete the oldest checkpoints; the rename comes first, so a crash leaves none with half its files.

    The last complete checkpoint of a stage stays: no newer one forms a model with the other stages'.
    """
    folders = _folders(directory)
    complete = [path for path in folders if (path / STAGES_FILE).is_file()]
    for path in folders[:-keep_last]:
        if complete and path == complete[-1]:
            continue
        doomed = directory / f"{_UNFINISHED}{path.name}"
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _remove_unfinished(directory: Path) -> None:
    for path in directory.glob(f"{_UNFINISHED}*"):
        logger.info("removed %s, left by a save that was interrupted", path)
        shutil.rmtree(path, ignore_errors=True)


def _clean_up(directory: Path) -> None:
    if not directory.is_dir():
        return
    try:
        with _locked(directory):
            _remove_unfinished(directory)
    except (ResourceError, OSError) as error:
        logger.info("did not clean up in %s: %s", directory, error)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock, which ends with the process; raise `ResourceError` if another process holds it."""
    descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResourceError(
                f"another process is saving a checkpoint in {directory}: give each peer a directory of its own"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _check_room(directory: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < num_bytes + SPARE_BYTES:
        raise ResourceError(
            f"a checkpoint of {num_bytes >> 20} MiB does not fit in {directory}, which has {free >> 20} MiB free;"
            " earlier checkpoints are intact: free some space or choose another directory"
        )
