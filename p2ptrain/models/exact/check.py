"""The check of a host's arithmetic before it serves: tiny models' bits against those in the repository."""

from __future__ import annotations

import hashlib
import logging
from typing import get_args

import torch

from p2ptrain.errors import IntegrityError
from p2ptrain.manifest import ModelSpec
from p2ptrain.models import build_model
from p2ptrain.models.building import deterministic_normal_
from p2ptrain.models.exact.gpu import load_gpu_kernels
from p2ptrain.models.exact.program import WeightFormat
from p2ptrain.models.exact.stage import ExactStage, Part
from p2ptrain.native.exact import AnyKernels, load_kernels

logger = logging.getLogger(__name__)

DIGEST = "965e4713bf0479d4dd9b3586eab42231b14ee697aa31680430edf72eebd4661c"
"""SHA-256 of the models' logits, on any CPU and GPU."""

_SHAPE = {"layers": 2, "hidden": 60, "heads": 6, "intermediate": 83, "vocabulary": 70, "context": 160}
_SPECS = (
    ModelSpec(family="llama", kv_heads=2, **_SHAPE),
    ModelSpec(family="gpt2", **_SHAPE),
    ModelSpec(family="qwen3", kv_heads=3, head_width=14, rope_scaling=(4.0, 1.0, 4.0, 64), **_SHAPE),
)
"""Odd widths, grouped heads, and more positions than two pages."""


def checked_kernels(device: torch.device) -> AnyKernels | None:
    """Return a device's kernels, or the CPU's where a GPU cannot run them; None if torch must compute.

    It may compile: call it off the event loop. Raises `IntegrityError` as `self_check`.
    """
    if device.type == "cuda" and (kernels := load_gpu_kernels(device)) is not None:
        try:
            self_check(kernels)
        except IntegrityError as error:
            logger.warning("serving computes on the CPU: %s", error)
        else:
            return kernels
    found = load_kernels()
    self_check(found)
    return found


def self_check(kernels: AnyKernels | None, threads: int = 1) -> None:
    """Raise `IntegrityError` if the kernels compute other bits than the repository's; torch is not checked."""
    if kernels is not None and digest(kernels, threads) != DIGEST:
        raise IntegrityError(
            f"the {kernels.build} kernels compute wrong bits on this machine: serve on another, and report this one"
        )


@torch.inference_mode()
def digest(kernels: AnyKernels, threads: int = 1) -> str:
    """Return the hash of the logits of 130 positions of tiny models of each family and format."""
    found = hashlib.sha256()
    for spec in _SPECS:
        model = build_model(spec)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # whose initial values are all 0 or 1
                spread = torch.empty_like(parameter)
                deterministic_normal_(spread, 0.1, name)
                parameter.add_(spread)
        ids = torch.arange(130) * 37 % spec.vocabulary
        for weights in get_args(WeightFormat):
            stage = ExactStage(model, spec, weights=weights, threads=threads, kernels=kernels)
            store = stage.new_pages(3)
            hidden = stage.step([Part(130, 0, range(3))], ids, store)
            found.update(stage.logits(hidden).numpy().tobytes())
    return found.hexdigest()
