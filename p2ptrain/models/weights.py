"""Pretrained parameters in a folder of Hugging Face's layout, read one by one, so that a stage reads only its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from p2ptrain.errors import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Weights:
    """The safetensors file of a folder, or several with their index; raises `ConfigError` if missing or malformed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = _index(folder)

    def read(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Return one parameter in fp32 on the CPU; raises `ConfigError` if it does not exist, or has another shape."""
        known = _known(name, self._files)
        if known is None:
            raise ConfigError(f"{self.folder} has no parameter {name!r}: is it this model's?")
        path = self.folder / self._files[known]
        try:
            with safe_open(path, framework="pt") as file:
                value: torch.Tensor = file.get_tensor(known)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        if tuple(value.shape) != tuple(shape):
            raise ConfigError(
                f"{path}: {known} is {list(value.shape)} and should be {list(shape)}: do the model's settings fit it?"
            )
        return value.float()


def files_with(index: Path, names: Iterable[str]) -> set[str]:
    """Return the names of the files that hold the parameters; raises `ConfigError` for a malformed or lacking index."""
    files = _index(index.parent)
    found = {name: _known(name, files) for name in names}
    missing = [name for name, known in found.items() if known is None]
    if missing:
        raise ConfigError(f"{index} has no parameter {missing[0]!r}: is it this model's?")
    return {files[known] for known in found.values() if known is not None}


def _known(name: str, files: Mapping[str, str]) -> str | None:
    """Return a parameter's name in the files; None if they lack it.

    Files of a bare model lack the prefix that a model with a head puts before its names.
    """
    return next((known for known in (name, name.partition(".")[2]) if known in files), None)


def block_digest() -> hashlib._Hash:
    """Return a new SHA-256 of a block's parameters, to be updated by `add_parameter` in the block's order."""
    return hashlib.sha256(b"p2ptrain block 1")


def add_parameter(digest: hashlib._Hash, name: str, value: torch.Tensor) -> None:
    """Hash a parameter (fp32, CPU); so a file in fp16 or bf16 and its copy in fp32 have one digest."""
    digest.update(json.dumps([name, list(value.shape)]).encode())
    digest.update(value.contiguous().view(-1).numpy().astype("<f4", copy=False).data)


def _index(folder: Path) -> dict[str, str]:
    index, single = folder / INDEX, folder / SINGLE
    try:
        if index.exists():
            files = json.loads(index.read_text())["weight_map"]
            # File names must not lead out of the folder.
            if all(isinstance(file, str) and Path(file).name == file for file in files.values()):
                return dict(files)
            raise ValueError("it names files elsewhere")
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ConfigError(f"{folder} holds no usable {INDEX} or {SINGLE}: {error}") from error
