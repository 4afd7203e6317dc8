"""Learning rates as pure functions of the swarm's step, equal on every peer and after every restart.

With ``every = 1`` the swarm's step is the round. With ``every = H`` it is the number of inner steps so far, over all
rounds of the lineage.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler

from p2ptrain.errors import UsageError
from p2ptrain.manifest import TrainingSpec

Schedule = Callable[[int], float]
"""Maps the swarm's step to a factor of the learning rate."""
Shape = Literal["constant", "cosine"]
"""The form of a schedule after its warm-up."""


def learning_rate_factor(
    step: int,
    *,
    warmup_steps: int,
    schedule: Shape = "constant",
    total_steps: int = 0,
    final_factor: float = 0.1,
) -> float:
    """Return the factor of the base learning rate after ``step`` optimizer steps.

    Linear warm-up from ``1 / warmup_steps`` to 1, then constant, or half a cosine down to ``final_factor``
    (Loshchilov and Hutter, *SGDR*, 2017, equation 5, without restarts). The cosine ends at ``total_steps``; later steps
    stay at ``final_factor``.

    Raises:
        ValueError: ``step`` is negative, or a cosine would end before its warm-up.
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
    return final_factor + (1 - final_factor) * 0.5 * (1 - _sine(math.pi * (progress - 0.5)))


def _sine(angle: float) -> float:
    """Return the sine of an angle from -pi / 2 to pi / 2, to 1e-15.

    IEEE operations give all peers the same bits; C libraries' sines differ in the last one.
    """
    term = total = angle
    for count in range(2, 24, 2):
        term *= -angle * angle / (count * (count + 1))
        total += term
    return total


def manifest_schedule(spec: TrainingSpec) -> Schedule:
    """Return the manifest's schedule: warm-up, then constant, or a cosine to the end of the run."""
    return partial(
        learning_rate_factor, warmup_steps=spec.warmup_steps, schedule=spec.schedule,
        total_steps=spec.rounds * spec.steps_per_round, final_factor=spec.final_rate,
    )  # fmt: skip


def by_round(schedule: Schedule, steps_per_round: int) -> Schedule:
    return lambda step: schedule(step // steps_per_round)


class LearningRates:
    """Sets the rates of an optimizer's groups to base rate times factor, and detects changes by other code.

    The base rates are those of the groups when this object is made; without a schedule they stay. Groups without a
    rate, or with None, as Adafactor may have it, are left alone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule | None = None) -> None:
        self._optimizer = optimizer
        self._schedule = schedule
        self._base = self.current()
        self._last = self._base

    @property
    def are_scheduled(self) -> bool:
        return self._schedule is not None

    def current(self) -> list[float | None]:
        rates = [group.get("lr") for group in self._optimizer.param_groups]
        return [None if rate is None else float(rate) for rate in rates]

    def sample(self) -> list[float | None]:
        """Return the factors at some of the swarm's steps, to six digits; peers compare schedules by them."""
        if self._schedule is None:
            return []
        factors: list[float | None] = []
        for step in (0, 1, 10, 100, 1000):
            try:
                factors.append(float(f"{float(self._schedule(step)):.6g}"))
            except (ArithmeticError, LookupError, ValueError):  # The schedule ends earlier.
                factors.append(None)
        return factors

    def set(self, step: int) -> None:
        """Set the rates of one of the swarm's steps; raise `UsageError` if the factor is negative or not finite."""
        factor = 1.0 if self._schedule is None else float(self._schedule(step))
        if not 0 <= factor < math.inf:
            raise UsageError(f"the schedule returned {factor:g} for step {step}: return a finite factor of at least 0")
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            if base is not None and isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(base * factor)
            elif base is not None:
                group["lr"] = base * factor
        self._last = self.current()

    def change(self) -> str:
        """Describe a change by other code since the last call of this or of `set`; empty for none."""
        before, self._last = self._last, self.current()
        for number, (old, new) in enumerate(zip(before, self._last, strict=False)):
            if old != new:
                return f"the learning rate of parameter group {number} went from {old} to {new}"
        return ""


class WrappedOptimizer:
    """A torch optimizer whose steps a swarm shares; ``clip_norm``, a step's norm limit, is 0 for none."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, schedule: Schedule | None = None, clip_norm: float = 0.0
    ) -> None:
        self.optimizer = optimizer
        self.rates = LearningRates(optimizer, schedule)
        self.clip_norm = clip_norm


def manifest_optimizer(module: torch.nn.Module, spec: TrainingSpec) -> WrappedOptimizer:
    """Return the manifest's inner optimizer: AdamW with its schedule and clipping."""
    inner = torch.optim.AdamW(
        module.parameters(), lr=spec.learning_rate, betas=(0.9, 0.95), weight_decay=spec.weight_decay
    )
    return WrappedOptimizer(inner, manifest_schedule(spec), spec.clip_norm)


class SwarmScheduler(LRScheduler):
    """The swarm's schedule as a torch scheduler, for training loops that require one.

    `step` counts nothing: it sets the rates of ``swarm_step()``. The state dict is empty, because the rates follow from
    that step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rates: LearningRates, swarm_step: Callable[[], int]) -> None:
        # torch's own __init__ is not called: it wraps `optimizer.step` and writes `initial_lr` into the groups.
        self.optimizer = optimizer
        self.base_lrs = [rate or 0.0 for rate in rates.current()]
        self._rates = rates
        self._swarm_step = swarm_step
        self._step_count = 0
        self.step()

    def step(self, epoch: int | None = None) -> None:
        self._step_count += 1
        self.last_epoch = self._swarm_step()
        if self._rates.are_scheduled:
            self._rates.set(self.last_epoch)

    def get_last_lr(self) -> list[float | torch.Tensor]:
        return [rate or 0.0 for rate in self._rates.current()]

    def get_lr(self) -> list[float | torch.Tensor]:
        return self.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step()
