"""Pretrained parameters in a folder as Hugging Face's tools write it, read one by one: a stage reads its own alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from p2ptrain.errors import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Weights:
    """The safetensors files of a folder.

    Args:
        folder: Holds one file, or several and their index.

    Raises:
        ConfigError: There is none, or it is malformed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = _index(folder)

    def read(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """One parameter in fp32 on the CPU.

        Files of a bare model lack the name of the part that a model with a head puts before it; so they are asked
        without, too.

        Raises:
            ConfigError: It is not there, or has another shape.
        """
        for known in (name, name.partition(".")[2]):
            if known in self._files:
                break
        else:
            raise ConfigError(f"{self._folder} has no parameter {name!r}: is it this model's?")
        path = self._folder / self._files[known]
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


def _index(folder: Path) -> dict[str, str]:
    """The file that each parameter is in."""
    index, single = folder / INDEX, folder / SINGLE
    try:
        if index.exists():
            files = json.loads(index.read_text())["weight_map"]
            # A name from a file must not lead out of the folder.
            if all(isinstance(file, str) and Path(file).name == file for file in files.values()):
                return dict(files)
            raise ValueError("it names files elsewhere")
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), SINGLE)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise ConfigError(f"{folder} holds no usable {INDEX} or {SINGLE}: {error}") from error
