"""A training thread in a simulation: thread and event loop take turns, so that virtual time and order replay.

The product trains on a thread that waits for coroutines on the event loop (`p2ptrain.training.bridge.Bridge`). Here
the loop stands still while the thread runs, and the thread stands still until the loop comes to its next turn.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from p2ptrain.errors import TemporaryError
from p2ptrain.training.bridge import Bridge

T = TypeVar("T")

TURN_SECONDS = 60.0
"""Real time that a turn of the thread may take."""


class _KilledError(BaseException):
    """Ends the thread of a peer that crashed."""


@dataclass
class _End:
    error: BaseException | None


class LockstepBridge(Bridge):
    """The product's bridge, whose thread runs only while the simulation's loop waits for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._turns: queue.SimpleQueue[Callable[[], Coroutine[Any, Any, None]] | _End] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._is_killed = False

    def run_thread(self, work: Callable[[], object]) -> asyncio.Future[None]:
        async def run() -> None:
            await self.run(work)

        return asyncio.ensure_future(run())

    async def run(self, work: Callable[[], T]) -> T:
        """Run ``work`` on a thread, in turns with the loop; cancelled, it ends the thread in its next turn."""
        result: list[T] = []

        def body() -> None:
            error: BaseException | None = None
            try:
                result.append(work())
            except BaseException as caught:
                error = caught
            self._turns.put(_End(error))

        thread = threading.Thread(target=body, name="lockstep", daemon=True)
        thread.start()
        try:
            while not isinstance(turn := self._turns.get(timeout=TURN_SECONDS), _End):
                await turn()
                self._answers.put(True)
        except BaseException:
            self._is_killed = True
            self._answers.put(False)
            raise
        finally:
            thread.join(TURN_SECONDS)
        if turn.error is not None:
            raise turn.error
        return result[0]

    # --- the thread's side

    def _hand_over(self, turn: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if not self._is_killed:
            self._turns.put(turn)
        if self._is_killed or not self._answers.get():
            raise _KilledError

    def sleep(self, seconds: float) -> None:
        self._hand_over(lambda: asyncio.sleep(seconds))

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if self.is_over():
            coroutine.close()
            raise TemporaryError(self._over)
        future: Future[T] = Future()

        def copy(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                future.cancel()
            elif (error := task.exception()) is not None:
                if not future.done():
                    future.set_exception(error)
            elif not future.done():
                future.set_result(task.result())

        async def turn() -> None:
            task = asyncio.create_task(coroutine, name="bridge")
            task.add_done_callback(copy)
            self._running.add(future)
            future.add_done_callback(self._running.discard)
            future.add_done_callback(lambda _: task.cancel())

        self._hand_over(turn)
        return future

    def finish(self, future: Future[T]) -> T:
        async def turn() -> None:
            is_done = asyncio.Event()
            future.add_done_callback(lambda _: is_done.set())
            await is_done.wait()

        self._hand_over(turn)
        try:
            return future.result(timeout=0)
        except FutureCancelledError as error:
            raise TemporaryError(self._over or "the swarm is closing") from error
