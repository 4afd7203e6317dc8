"""Bounds on what a stage host holds for others, in all and for each trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from p2ptrain.pipeline.messages import FullError


@dataclass(frozen=True)
class Limits:
    """All bounds of a host's concurrent work.

    Attributes:
        max_bytes: Held for all unsettled microbatches, and separately for those that are being received.
        max_running: Microbatches between their admission and the end of their backward pass.
        max_samples: Of all unsettled microbatches.
        max_early: Microbatches that wait for their round; separately, that are not admitted yet.
        max_evaluations: Forward-only microbatches.
        max_share: Of each bound, for one trainer, so that none can fill a host; its first microbatch always fits.
    """

    max_bytes: int = 1 << 30
    max_running: int = 64
    max_samples: int = 1 << 16
    max_early: int = 256
    max_evaluations: int = 8
    max_share: float = 0.5


class Amounts(NamedTuple):
    """Microbatches, their samples and their bytes."""

    microbatches: int = 0
    samples: int = 0
    num_bytes: int = 0

    def plus(self, more: Amounts, sign: int = 1) -> Amounts:
        return Amounts(*(mine + sign * other for mine, other in zip(self, more, strict=True)))


class Budget:
    """Amounts held for each owner; ``total`` is their sum. ``doing`` ends the sentence "N microbatches ..."."""

    def __init__(self, most: Amounts, share: float, doing: str) -> None:
        self.total = Amounts()
        self._most = most
        self._share = share
        self._doing = doing
        self._held: dict[str, Amounts] = {}

    def check(self, owner: str, more: Amounts) -> None:
        """Raise `FullError` if there is no room for ``more`` of an owner now."""
        held = self._held.get(owner, Amounts())
        for most, total, mine, wanted in zip(self._most, self.total, held, more, strict=True):
            if wanted and total + wanted > most:
                number = self.total.microbatches
                raise FullError(f"{number} microbatches {self._doing}: come again, or go to another host")
            if wanted and mine and mine + wanted > self._share * most:
                raise FullError(f"{held.microbatches} microbatches of this peer {self._doing}: wait for some of them")

    def add(self, owner: str, more: Amounts) -> None:
        self._change(owner, more, 1)

    def remove(self, owner: str, less: Amounts) -> None:
        self._change(owner, less, -1)

    @contextmanager
    def hold(self, owner: str, more: Amounts) -> Iterator[Callable[[], None]]:
        """Hold amounts until the end of the block, or until the yielded function is called.

        Raises:
            FullError: There is no room now.
        """
        self.check(owner, more)
        self.add(owner, more)
        with ExitStack() as reservation:
            reservation.callback(self.remove, owner, more)
            yield reservation.close

    def _change(self, owner: str, amounts: Amounts, sign: int) -> None:
        self.total = self.total.plus(amounts, sign)
        held = self._held.get(owner, Amounts()).plus(amounts, sign)
        if any(held):
            self._held[owner] = held
        else:
            del self._held[owner]
