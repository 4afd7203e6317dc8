"""Queue of a device: one pass at a time, backward before forward (1F1B).

Backward frees memory here and unblocks earlier stages, so it goes first (Narayanan et al., *PipeDream*, 2019, section
3.2). Passes of one kind run in order of arrival.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

from p2ptrain.runtime import Runtime
from p2ptrain.tasks import Tasks

T = TypeVar("T")


class Pass(IntEnum):
    """Kinds of passes; smaller values have priority."""

    UNDO = 0
    BACKWARD = 1
    FORWARD = 2


@dataclass(frozen=True)
class Timed(Generic[T]):
    """A pass's result, and its time: ``seconds`` with the queue, ``busy_seconds`` on the device alone."""

    result: T
    seconds: float
    busy_seconds: float


IDLE_SECONDS = 5.0
"""Time after its last pass from which on a device counts as free for other work."""


class Device:
    """Runs passes in the runtime's device thread, one at a time."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._waiting: list[tuple[Pass, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._is_busy = False
        self._used_at = -IDLE_SECONDS
        self._tasks = Tasks()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_in_use(self) -> bool:
        """True if a pass runs, or ended less than `IDLE_SECONDS` ago."""
        return self._is_busy or asyncio.get_running_loop().time() - self._used_at < IDLE_SECONDS

    async def run(self, kind: Pass, work: Callable[[], T]) -> Timed[T]:
        """Run ``work()`` in its turn; return its result, or raise its error.

        A cancelled pass does not run, or runs to its end if it has begun.
        """
        asked = asyncio.get_running_loop().time()
        if self._is_busy:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (kind, next(self._order), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._next()
                raise
        self._is_busy = True
        task = self._tasks.call(self._finish(kind, work, asked), "device-pass")
        # An error after the caller's cancellation is dropped.
        task.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        return await asyncio.shield(task)

    async def _finish(self, kind: Pass, work: Callable[[], T], asked: float) -> Timed[T]:
        """Run a pass to its end, and start the next one."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            result = await self._compute(kind, work)
        finally:
            self._next()
        return Timed(result, loop.time() - asked, loop.time() - began)

    async def _compute(self, kind: Pass, work: Callable[[], T]) -> T:
        return await self.runtime.on_device(work)

    def _next(self) -> None:
        """Start the first pass in the queue."""
        self._used_at = asyncio.get_running_loop().time()
        self._is_busy = False
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                self._is_busy = True
                turn.set_result(None)
                return
