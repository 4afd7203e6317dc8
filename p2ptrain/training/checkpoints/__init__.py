"""Checkpoints of a peer's training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SavePolicy:
    """How often a peer saves by itself, and how many checkpoints it keeps.

    Attributes:
        every_rounds: Save after this many committed rounds; 0 for never.
        every_minutes: Save after this many minutes; 0 for never.
        keep_last: Checkpoints to keep; at least 1.
    """

    every_rounds: int = 0
    every_minutes: float = 10.0
    keep_last: int = 3

    def __post_init__(self) -> None:
        if self.every_rounds < 0 or not 0 <= self.every_minutes < 1e9 or self.keep_last < 1:
            raise ValueError(f"a save policy needs intervals >= 0 and keep_last >= 1, not {self}")
