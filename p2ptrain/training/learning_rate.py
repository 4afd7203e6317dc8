"""The inner learning rate as a pure function of the step, so that every peer and every resumed run has the same."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "cosine"]


def learning_rate_factor(
    step: int, *, warmup_steps: int, schedule: Schedule = "constant", total_steps: int = 0, final_factor: float = 0.1
) -> float:
    """What to multiply the base learning rate with at an optimizer step.

    Linear warm-up from ``1 / warmup_steps`` to 1, then constant, or half a cosine down to ``final_factor``
    (Loshchilov and Hutter, *SGDR*, 2017, equation 5, without restarts).

    Args:
        step: Optimizer steps taken before this one, from 0.
        warmup_steps: Steps of warm-up; 0 for none.
        schedule: What follows the warm-up.
        total_steps: The step at which the cosine ends; later steps stay at ``final_factor``.
        final_factor: Where the cosine ends.

    Raises:
        ValueError: ``step`` is negative, or a cosine is asked for that ends before its warm-up does.
    """
    if step < 0:
        raise ValueError(f"step must not be negative, but is {step}")
    if schedule == "cosine" and total_steps <= warmup_steps:
        raise ValueError(f"a cosine needs total_steps ({total_steps}) above warmup_steps ({warmup_steps})")
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    return final_factor + (1 - final_factor) * 0.5 * (1 + math.cos(math.pi * progress))
