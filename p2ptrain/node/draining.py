"""Shutdown of a leaving peer within its drain time (``drain_seconds`` of its role file).

::

    0           1/3           1/2                          5/6     1
    ├─ hand in ──┼─ save ──────┼─ rescue, save ─────────────┼─ bye ─┤
     the round    rounds are    the shared state is saved    goodbye, daemon
     in progress  cancelled     from the event loop

A training thread that is stuck in a batch is abandoned: the event loop saves the shared state in its place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from p2ptrain.errors import CheckpointError
from p2ptrain.node.process import StopSignals
from p2ptrain.runtime import Runtime, left_behind
from p2ptrain.tasks import Tasks

if TYPE_CHECKING:
    from p2ptrain.training.bridge import Bridge
    from p2ptrain.training.loop import Trainer

logger = logging.getLogger(__name__)

T = TypeVar("T")

HAND_IN, RESCUE, LAST = 1 / 3, 1 / 2, 5 / 6
"""Fractions of the drain time at which rounds are cancelled, the event loop saves, and the peer says goodbye."""
MAX_TRIES = 10
RETRY_SECONDS = 0.2
"""Pause between the `MAX_TRIES` attempts to save a state that a round is changing."""


class Drain:
    """The deadlines of a leaving peer, whose process has to end in ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = asyncio.get_running_loop().time()

    def left(self, share: float) -> float:
        """Return the seconds left of the first ``share`` of the time; at least 0."""
        return max(0.0, self._began + share * self._seconds - asyncio.get_running_loop().time())


async def unless_stopped(start: Coroutine[Any, Any, T], signals: StopSignals) -> T | None:
    """Return the result of ``start``; cancel it and return None if a stop is requested first."""
    async with Tasks() as tasks:
        starting, wanted = tasks.call(start, "start"), tasks.call(signals.requested.wait(), "stop")
        await asyncio.wait({starting, wanted}, return_when=asyncio.FIRST_COMPLETED)
        return starting.result() if starting.done() else None


async def until_over(work: asyncio.Future[Any], signals: StopSignals, minutes: float) -> str:
    """Wait until ``work`` ends, a stop is requested, or ``minutes`` have passed (0 for no limit); return why."""
    async with Tasks() as tasks:
        wanted = tasks.call(signals.requested.wait(), "stop")
        await asyncio.wait({work, wanted}, timeout=60 * minutes or None, return_when=asyncio.FIRST_COMPLETED)
    return signals.reason or ("rounds" if work.done() else "minutes")


async def end_training(
    trainer: Trainer, bridge: Bridge, done: asyncio.Future[None], runtime: Runtime, seconds: float
) -> None:
    """End the training thread within ``seconds``, or abandon it; raise if the last committed state is not saved."""
    drain = Drain(seconds)
    trainer.stop(drain.left(LAST))
    await asyncio.wait({done}, timeout=drain.left(HAND_IN))
    bridge.cancel("the peer leaves")
    await asyncio.wait({done}, timeout=drain.left(RESCUE))
    has_failed_to_save = done.done() and trainer.unsaved is not None
    if not (trainer.is_saving or trainer.is_saved or has_failed_to_save):
        await _rescue(trainer, runtime)
    await asyncio.wait({done}, timeout=drain.left(LAST))
    if not done.done():
        left_behind.append("train")
        logger.warning("the training thread does not end: leaving it behind; its last batches are not contributed")
    if trainer.unsaved is not None:
        raise trainer.unsaved


async def _rescue(trainer: Trainer, runtime: Runtime) -> None:
    """Save the shared state for a training thread that is stuck or has failed."""
    for tries_left in reversed(range(MAX_TRIES)):
        try:
            path = await runtime.compute(trainer.saver.save_shared)
        except CheckpointError:  # A round may be changing the state.
            if not tries_left:
                raise
            await asyncio.sleep(RETRY_SECONDS)
        else:
            logger.warning("the training thread does not save: saved what the swarm shares in %s", path)
            trainer.unsaved = None
            return
