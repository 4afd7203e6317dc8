"""A deterministic asyncio event loop in virtual time.

When no callback is ready, time jumps to the next timer. Callbacks run in the order of scheduling, timers by time and
then by creation. Tasks hash by creation number, so even a set of tasks (as in `asyncio.TaskGroup`) has the same order
in every run.

A callback may have an *owner*, a context variable that tasks inherit. The loop keeps the callbacks of a frozen owner
until a thaw (a stopped process), and drops those of a buried owner (a killed process).
"""

from __future__ import annotations

import asyncio
import math
import sys
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from itertools import count
from typing import Any, Self, TypeVar, TypeVarTuple, Unpack, cast

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_REAP_ROUNDS = 100
"""Cancellations of a task before it counts as one that never ends."""

current_owner: ContextVar[object | None] = ContextVar("current_owner", default=None)
"""Simulated process of the running code."""


class SimulationError(Exception):
    """The simulation cannot continue, or left tasks or streams behind."""


class SimulationDeadlock(SimulationError):
    """No callback is ready, no timer is set, and the simulation has not ended."""


class VirtualHandle(asyncio.TimerHandle):
    __slots__ = ()

    def __init__(  # skips the base class's on purpose: that only adds slow debugging aids
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> None:
        self._when = when
        self._callback = callback
        self._args = args
        self._context = copy_context() if context is None else context
        self._cancelled = False
        self._repr = None
        self._source_traceback = None

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = _nothing
        self._args = ()


def _nothing() -> None:
    """Callback of a cancelled handle, so that the handle keeps nothing alive."""


class VirtualTask(asyncio.Task[Any]):
    """A task that hashes by its creation number and belongs to a simulated process."""

    number = 0
    owner: object | None = None

    def __hash__(self) -> int:
        return self.number


class VirtualTimeLoop(asyncio.AbstractEventLoop):
    """Event loop of one simulation, limited in virtual time and callbacks.

    Attributes:
        errors: Contexts of uncaught exceptions, as passed to `asyncio.AbstractEventLoop.call_exception_handler`.
    """

    def __init__(self, *, max_seconds: float = 7 * 86400.0, max_callbacks: int = 100_000_000) -> None:
        self.errors: list[dict[str, Any]] = []
        self.num_callbacks = 0
        self._max_seconds = max_seconds
        self._max_callbacks = max_callbacks
        self._now = 0.0
        self._ready: deque[VirtualHandle] = deque()
        self._timers: list[tuple[float, int, VirtualHandle]] = []
        self._numbers = count()
        self._running = False
        self._closed = False
        self._frozen: dict[object, list[VirtualHandle]] = {}
        self._buried: dict[object, None] = {}
        self._owned = False
        self._tasks: list[weakref.ref[VirtualTask]] = []
        self._tasks_before_sweep = 1024

    @classmethod
    def create(cls, *, max_seconds: float = 7 * 86400.0, max_callbacks: int = 100_000_000) -> Self:
        """Return a new loop; methods for sockets, signals, threads and processes are not implemented on purpose."""
        return cls(max_seconds=max_seconds, max_callbacks=max_callbacks)

    # The interface for asyncio

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = VirtualHandle(0.0, callback, args, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Raise `SimulationError`: threads are not deterministic."""
        raise SimulationError("threads cannot be simulated: run the work inline")

    def run_in_executor(self, executor: object, func: Callable[[Unpack[Ts]], T], *args: *Ts) -> asyncio.Future[T]:
        """Run ``func`` at once, on the loop's thread."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = VirtualHandle(when, callback, args, context)
        heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def call_later(
        self, delay: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As asyncio's, in virtual time. A positive delay moves time by one representable step at least."""
        when = self._now + delay
        if when == self._now and delay > 0:
            when = math.nextafter(when, math.inf)
        return self.call_at(when, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        number = next(self._numbers)
        task = VirtualTask.__new__(VirtualTask)
        task.number = number
        VirtualTask.__init__(task, coro, loop=self, name=str(name or f"task {number}"), context=context)
        task.owner = current_owner.get() if context is None else context.get(current_owner)
        self._tasks.append(weakref.ref(task))
        if len(self._tasks) > self._tasks_before_sweep:
            self._sweep()
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Drop all scheduled callbacks; idempotent."""
        self._closed = True
        self._ready.clear()
        self._timers.clear()
        self._frozen.clear()

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(context)

    # Running

    def run_until_complete(self, future: Awaitable[T] | Generator[Any, None, T]) -> T:
        """Run until ``future`` is done and return its result.

        Raises `SimulationDeadlock` if it can never be done, and `SimulationError` if a limit is reached or a plain
        callback raises.
        """
        main: asyncio.Future[T] = asyncio.ensure_future(cast(Awaitable[T], future), loop=self)
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._close_generator)
        asyncio._set_running_loop(self)
        self._running = True
        try:
            while not main.done():
                self._run_once()
        finally:
            self._running = False
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)
        return main.result()

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        if not ready:
            while timers and timers[0][2]._cancelled:
                heappop(timers)
            if not timers:
                raise SimulationDeadlock(f"at {self._now:.3f} s nothing can happen any more; {self.describe_tasks()}")
            self._now = max(self._now, timers[0][0])
            if self._now > self._max_seconds:
                raise SimulationError(f"not done after {self._max_seconds:g} virtual s; {self.describe_tasks()}")
        now = self._now
        while timers and timers[0][0] <= now:
            ready.append(heappop(timers)[2])
        todo = len(ready)
        self.num_callbacks += todo
        if self.num_callbacks > self._max_callbacks:
            raise SimulationError(f"not done after {self._max_callbacks} callbacks; {self.describe_tasks()}")
        for _ in range(todo):
            handle = ready.popleft()
            if handle._cancelled or (self._owned and self._held(handle)):
                continue
            try:
                handle._context.run(handle._callback, *handle._args)
            except Exception as error:
                raise SimulationError(f"a callback raised {error!r} at {now:.3f} s") from error

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._closed:
            self.create_task(generator.aclose())

    # Owners

    def _held(self, handle: VirtualHandle) -> bool:
        owner = handle._context.get(current_owner)
        if owner in self._frozen:
            self._frozen[owner].append(handle)
            return True
        return owner in self._buried

    def freeze(self, owner: object) -> None:
        """Run none of ``owner``'s callbacks until `thaw`."""
        self._frozen.setdefault(owner, [])
        self._owned = True

    def is_frozen(self, owner: object) -> bool:
        return owner in self._frozen

    def thaw(self, owner: object) -> None:
        """Run ``owner``'s kept callbacks, in order, and all later ones."""
        self._ready.extend(self._frozen.pop(owner, ()))

    def bury(self, owner: object) -> None:
        """Drop all of ``owner``'s callbacks from now on."""
        self.thaw(owner)
        self._buried[owner] = None
        self._owned = True

    def pending_tasks(self, owner: object = None) -> list[VirtualTask]:
        """Return the unfinished tasks, of ``owner`` or of all, in the order of their creation."""
        tasks = [task for reference in self._tasks if (task := reference()) is not None and not task.done()]
        return [task for task in tasks if owner is None or task.owner is owner]

    def _sweep(self) -> None:
        self._tasks = [ref for ref in self._tasks if (task := ref()) is not None and not task.done()]
        self._tasks_before_sweep = 2 * len(self._tasks) + 1024

    def describe_tasks(self) -> str:
        """Return the pending tasks and where each waits, for an error message."""
        tasks = self.pending_tasks()
        lines = [f"{task.get_name()} of {task.owner or 'nobody'}: {_where(task)}" for task in tasks[:20]]
        return f"{len(tasks)} tasks are pending" + "".join(f"\n  {line}" for line in lines)


def _where(task: asyncio.Task[Any]) -> str:
    stack = task.get_stack(limit=4)
    places = [f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}" for frame in stack]
    name = getattr(task.get_coro(), "__qualname__", "?")
    return f"{name} at {' > '.join(places) or 'its end'}"
