"""Measurements of a machine before it hosts a stage: free memory, and speed within device and uplink."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.models.blocks import Span

if TYPE_CHECKING:
    import torch

    from p2ptrain.pipeline.plan import PipelinePlan

SECONDS = 1.0
"""Duration of the measurement; a warm-up pass and one timed pass always run."""
CGROUPS = Path("/sys/fs/cgroup")


def available_memory(cgroups: Path = CGROUPS) -> int:
    """Return the machine's available memory in bytes, bounded by its container's limit (control groups 1 or 2)."""
    import psutil

    return min([int(psutil.virtual_memory().available), *_left_in_container(cgroups)])


def _left_in_container(cgroups: Path) -> list[int]:
    """Return the bytes left under the container's limit, if any; inactive file cache counts as free."""
    for folder, limit, used, cached in (
        (cgroups, "memory.max", "memory.current", "inactive_file"),
        (cgroups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # Not this version, or "max": no limit.
            left = int((folder / limit).read_text()) - int((folder / used).read_text())
            lines = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return [max(0, left + int(lines.get(cached, 0)))]
    return []


def measure_speed(plan: PipelinePlan, device: torch.device, bandwidth: int = 0) -> float:
    """Return a machine's speed as hosts report it: tokens per second of a stage, times the work of a sample.

    It times forward and backward of a block from the model's middle. The block has initial values, so nothing is
    downloaded. A model of fewer than three blocks has no such block, and gives 0. ``bandwidth`` is the upload limit in
    bytes per second, or 0 for none.
    """
    import torch

    from p2ptrain.pipeline.messages import TensorHead
    from p2ptrain.pipeline.stage.compute import StageCompute

    spec, inputs = plan.manifest, plan.inner_shape
    number = plan.num_blocks // 2
    if plan.num_blocks < 3:
        return 0.0
    span = Span(number, number + 1)
    stage = plan.build_span(span).to(device)
    compute, generator = StageCompute(stage), torch.Generator().manual_seed(1)
    hidden = torch.randn(inputs, generator=generator)
    gradient = torch.randn(inputs, generator=generator) / math.prod(inputs)
    fastest, deadline = math.inf, time.perf_counter() + SECONDS
    for turn in range(1_000):
        began = time.perf_counter()
        compute.forward(hidden)
        compute.backward(hidden, gradient)
        if turn:
            fastest = min(fastest, time.perf_counter() - began)
            if time.perf_counter() > deadline:
                break
    tokens = inputs[0] * inputs[1]
    speed = tokens / fastest * plan.work_of(span)
    if bandwidth:  # A host uploads an output and a gradient for each input.
        sent = 2 * TensorHead(spec.pipeline.codec, inputs).num_bytes
        speed = min(speed, tokens * bandwidth / sent * plan.work_of(Span(0, plan.num_blocks)) / plan.num_stages)
    return speed
