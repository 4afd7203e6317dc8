"""Measurements of a machine before it hosts anything: its memory, its device, its uplink."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.models.family import Span

if TYPE_CHECKING:
    import torch

    from p2ptrain.pipeline.plan import PipelinePlan

SECONDS = 1.0
"""Time over which passes are measured; the first, which is not counted, and one more are made in any case."""


CGROUPS = Path("/sys/fs/cgroup")


def available_memory(cgroups: Path = CGROUPS) -> int:
    """Bytes that this machine has to spare, or the container that this process runs in if it has a limit.

    Args:
        cgroups: Where a container's own limit and use are shown, by either version of Linux' control groups.
    """
    import psutil

    return min([int(psutil.virtual_memory().available), *_left_in_container(cgroups)])


def _left_in_container(cgroups: Path) -> list[int]:
    """Return what its limit leaves, if it has one. Cached files count as used, and are given up first."""
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
    """Tokens per second of a stage times the work of one of its samples, as hosts are compared.

    It is measured by forward and backward of one block from the middle of the model, with initial values, for which
    nothing is downloaded.

    Args:
        plan: The stages.
        device: Where this machine would compute.
        bandwidth: What it is willing to send, in bytes per second; 0 for no limit.

    Returns:
        0 for a model of fewer than three blocks, which has none in the middle.
    """
    import torch

    from p2ptrain.pipeline.messages import payload_bytes
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
    if bandwidth:  # An output and a gradient for each input.
        sent = 2 * payload_bytes(spec.pipeline.codec, inputs)
        speed = min(speed, tokens * bandwidth / sent * plan.work_of(Span(0, plan.num_blocks)) / plan.num_stages)
    return speed
