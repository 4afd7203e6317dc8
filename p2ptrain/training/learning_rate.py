"""Learning rates as pure functions of the swarm's step, so that every peer and every resumed run has the same.

The swarm's step is the round with ``every = 1``, and the number of inner steps up to here, over all rounds of the
lineage, with ``every = H``. A peer that joins late, replays rounds or starts again has the rates of the others.
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
"""From the swarm's step to the factor of the learning rate."""
Shape = Literal["constant", "cosine"]
"""Of a schedule after its warm-up."""


def learning_rate_factor(
    step: int,
    *,
    warmup_steps: int,
    schedule: Shape = "constant",
    total_steps: int = 0,
    final_factor: float = 0.1,
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
    return final_factor + (1 - final_factor) * 0.5 * (1 - _sine(math.pi * (progress - 0.5)))


def _sine(angle: float) -> float:
    """Return the sine of an angle from -pi / 2 to pi / 2, to 1e-15.

    Each operation is IEEE's, so that peers get the same bits. C libraries' own sines differ in the last one.
    """
    term = total = angle
    for count in range(2, 24, 2):
        term *= -angle * angle / (count * (count + 1))
        total += term
    return total


def manifest_schedule(spec: TrainingSpec) -> Schedule:
    """Return the schedule that a manifest asks for: warm-up, then constant, or a cosine that ends with the run."""
    return partial(
        learning_rate_factor, warmup_steps=spec.warmup_steps, schedule=spec.schedule,
        total_steps=spec.rounds * spec.steps_per_round, final_factor=spec.final_rate,
    )  # fmt: skip


def by_round(schedule: Schedule, steps_per_round: int) -> Schedule:
    """Return ``schedule``, which takes rounds, as one that takes the swarm's steps."""
    return lambda step: schedule(step // steps_per_round)


class LearningRates:
    """Sets the rates of an optimizer's groups to base rate times factor, and notices when other code changes them.

    The base rates are the rates of the groups when this object is made. Groups without a rate are left alone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule | None = None) -> None:
        """
        Args:
            optimizer: Whose groups.
            schedule: From the swarm's step to the factor; None keeps the base rates.
        """
        self._optimizer = optimizer
        self._schedule = schedule
        self._base = self.current()
        self._last = self._base

    @property
    def are_scheduled(self) -> bool:
        """True if a schedule sets the rates; False if they are constant."""
        return self._schedule is not None

    def current(self) -> list[float | None]:
        """The rates of the groups now."""
        return [None if "lr" not in group else float(group["lr"]) for group in self._optimizer.param_groups]

    def sample(self) -> list[float | None]:
        """Return the factors of some of the swarm's steps, six digits each, by which peers compare schedules."""
        if self._schedule is None:
            return []
        factors: list[float | None] = []
        for step in (0, 1, 10, 100, 1000):
            try:
                factors.append(float(f"{float(self._schedule(step)):.6g}"))
            except (ArithmeticError, LookupError, ValueError):  # A schedule that ends before.
                factors.append(None)
        return factors

    def set(self, step: int) -> None:
        """Set the rates of one of the swarm's steps.

        Raises:
            UsageError: The schedule returned no finite number of at least 0.
        """
        factor = 1.0 if self._schedule is None else float(self._schedule(step))
        if not 0 <= factor < math.inf:
            raise UsageError(f"the schedule returned {factor:g} for step {step}: return a finite factor of at least 0")
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            if base is not None:
                _assign(group, base * factor)
        self._last = self.current()

    def change(self) -> str:
        """Describe what other code changed since the last call of this or of `set`; empty if nothing changed."""
        before, self._last = self._last, self.current()
        for number, (old, new) in enumerate(zip(before, self._last, strict=False)):
            if old != new:
                return f"the learning rate of parameter group {number} went from {old} to {new}"
        return ""


class SwarmScheduler(LRScheduler):
    """The swarm's schedule in the form of a torch scheduler, for training loops that want one.

    `step` counts nothing: it sets the rates of the round in progress.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rates: LearningRates, swarm_step: Callable[[], int]) -> None:
        """
        Args:
            optimizer: What the training loop takes for the optimizer.
            rates: Of it.
            swarm_step: Returns the swarm's step.
        """
        # Not torch's own: that one wraps `optimizer.step` and writes `initial_lr` into the groups.
        self.optimizer = optimizer
        self.base_lrs = [rate or 0.0 for rate in rates.current()]
        self._rates = rates
        self._swarm_step = swarm_step
        self._step_count = 0
        self.step()

    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the swarm's step; ``epoch`` is ignored."""
        self._step_count += 1
        self.last_epoch = self._swarm_step()
        if self._rates.are_scheduled:
            self._rates.set(self.last_epoch)

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """The rates of the groups now."""
        return [rate or 0.0 for rate in self._rates.current()]

    def get_lr(self) -> list[float | torch.Tensor]:
        """The same."""
        return self.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the round says it all."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the rates of the swarm's step, whatever is loaded."""
        self.step()


def _assign(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
