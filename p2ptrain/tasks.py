"""Tasks on the event loop with an owner, which cancels them and receives their failures.

asyncio logs a task's exception only at garbage collection, which a reference in a list or set prevents. A `Tasks`
belongs to the object or block that starts tasks:

* ``start``: a background task. A failure is logged at once. A block is cancelled and raises the error; an object's
  ``on_failure`` is called.
* ``keep``: a loop that must not end. A failure is logged, and the loop is restarted with backoff.
* ``call``: a task that the caller awaits and whose failure the caller handles.
* `together`: concurrent coroutines; the first failure cancels the others.
* `Backoff`: the pauses between attempts.

`tests/unit/test_tasks.py` refuses asyncio's own functions elsewhere in the package: ``create_task``,
``ensure_future``, ``TaskGroup``, ``gather``, and wrappers of a coroutine such as ``shield(coroutine())``.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

from p2ptrain.errors import P2PTrainError

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 1.0
"""First backoff of a failed loop; doubles with each consecutive failure."""
LONGEST_PAUSE_SECONDS = 60.0
"""Largest backoff; a loop that ran this long without a failure resets its backoff."""

T = TypeVar("T")


class Backoff:
    """Pauses between attempts: each is twice as long as the one before, up to a limit.

    Args:
        first: First pause in seconds; also the first one after a `reset`.
        longest: Longest pause in seconds.
        jitter: Generator that varies each pause by half of it, so that peers do not retry in step.
    """

    def __init__(self, first: float, longest: float, jitter: random.Random | None = None) -> None:
        self._first, self._longest, self._jitter = first, longest, jitter
        self._pause = first

    def next(self) -> float:
        """Return the seconds to wait now, and double the next pause."""
        pause, self._pause = self._pause, min(2 * self._pause, self._longest)
        return pause * (0.5 + self._jitter.random()) if self._jitter is not None else pause

    def reset(self) -> None:
        """Start over after a success."""
        self._pause = self._first


class Tasks:
    """The tasks of one owner.

    An object creates one and awaits `close` in its own ``close``. A function uses it as a block, whose end cancels the
    remaining tasks::

        async with Tasks() as tasks:
            tasks.start(beat(channel), "beat")
            answer = tasks.call(ask(peer), f"ask-{peer}")
            await asyncio.wait({answer, channel.lost}, return_when=asyncio.FIRST_COMPLETED)

    Args:
        on_failure: Called on the event loop with the error of each failed ``start`` task.
    """

    def __init__(self, on_failure: Callable[[Exception], None] | None = None) -> None:
        self._on_failure = on_failure
        self._running: dict[asyncio.Task[Any], None] = {}
        self._called_here: list[asyncio.Task[Any]] | None = None
        self._block: asyncio.Task[Any] | None = None
        self._failure: Exception | None = None
        self._is_closing = False

    def __len__(self) -> int:
        return len(self._running)

    def start(self, coroutine: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start a background task; ``name`` identifies it in the log."""
        return self._create(coroutine, name, self._ended)

    def keep(self, loop: Callable[[], Awaitable[object]], name: str) -> asyncio.Task[Any]:
        """Start a loop and restart it after each failure, until it returns or the owner closes."""
        return self.start(_again(loop, name), name)

    def call(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task that the caller awaits."""
        return self._create(coroutine, name, self._called)

    async def close(self, grace_seconds: float = 0.0) -> None:
        """Wait up to ``grace_seconds`` for the tasks, then cancel the rest and wait for them; idempotent.

        A cancellation ends the grace period.
        """
        own = asyncio.current_task()
        try:
            if grace_seconds and (tasks := [task for task in self._running if task is not own]):
                await asyncio.wait(tasks, timeout=grace_seconds)
        finally:
            self._is_closing = True
            while tasks := [task for task in self._running if task is not own]:  # A task may start another as it ends.
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                for task in tasks:
                    self._running.pop(task, None)

    async def join(self) -> None:
        while self._running:
            await asyncio.wait(self._running)

    async def __aenter__(self) -> Self:
        self._block, self._called_here = asyncio.current_task(), []
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        block, self._block = self._block, None
        assert block is not None
        try:
            await self.close()
        finally:  # Also if the block is cancelled while it closes.
            for task in self._called_here or ():
                if task._log_traceback:  # Its result was never retrieved.
                    _log(task, task.exception(), logging.DEBUG)
            self._called_here = None
        if self._failure is not None:
            is_only_ours = block.uncancel() == 0
            if error is None or (isinstance(error, asyncio.CancelledError) and is_only_ours):
                raise self._failure

    def _create(
        self, coroutine: Coroutine[Any, Any, T], name: str, ended: Callable[[asyncio.Task[Any]], None]
    ) -> asyncio.Task[T]:
        task = asyncio.create_task(coroutine, name=name)
        self._running[task] = None
        task.add_done_callback(ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.pop(task, None)
        if task.cancelled() or not isinstance(error := task.exception(), Exception):
            return
        _log(task, error, logging.DEBUG if self._is_closing else logging.ERROR)
        if self._is_closing:
            return
        if self._block is not None and self._failure is None:
            self._failure = error
            self._block.cancel()
        if self._on_failure is not None:
            self._on_failure(error)

    def _called(self, task: asyncio.Task[Any]) -> None:
        self._running.pop(task, None)
        if not task._log_traceback:
            return
        if self._called_here is not None:
            self._called_here.append(task)
        elif self._is_closing:  # Its caller may be gone.
            _log(task, task.exception(), logging.DEBUG)


async def together(name: str, coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order; the first failure cancels the others.

    ``asyncio.gather`` alone would leave the others running without an owner.
    """
    async with Tasks() as tasks:
        return await asyncio.gather(*[tasks.call(each, name) for each in coroutines])


async def until_ended(*tasks: asyncio.Future[Any]) -> None:
    """Wait for tasks without raising their errors; a cancellation of the caller cancels them."""
    await asyncio.gather(*tasks, return_exceptions=True)


async def to_its_end(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to completion even if the caller is cancelled meanwhile; then raise the cancellation."""
    task = asyncio.create_task(coroutine, name="to-its-end")
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled() and (error := task.exception()) is not None:
            _log(task, error, logging.ERROR)
        raise


async def _again(loop: Callable[[], Awaitable[object]], name: str) -> None:
    clock, backoff = asyncio.get_running_loop(), Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
    while True:
        began = clock.time()
        try:
            await loop()
            return
        except Exception as error:
            if clock.time() - began >= LONGEST_PAUSE_SECONDS:
                backoff.reset()
            pause = backoff.next()
            trace = None if isinstance(error, P2PTrainError) else error
            logger.error("%s failed (%s): starting it again in %.0f s", name, _text(error), pause, exc_info=trace)
        await asyncio.sleep(pause)


def _log(task: asyncio.Task[Any], error: BaseException | None, expected: int) -> None:
    """Log a task's failure: an expected error at level ``expected``, a defect as an error with its traceback."""
    if isinstance(error, (P2PTrainError, OSError, EOFError)):
        logger.log(expected, "%s failed: %s", task.get_name(), _text(error))
    else:
        logger.error("%s failed", task.get_name(), exc_info=error)


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
