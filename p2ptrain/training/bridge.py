"""`Bridge`: the training thread's access to the network's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from p2ptrain.errors import P2PTrainError, TemporaryError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Bridge:
    """Runs coroutines on the network's event loop for the training thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._running: set[Future[Any]] = set()
        self._over = ""
        self._ended = threading.Event()

    def run_thread(self, work: Callable[[], object]) -> asyncio.Future[None]:
        """Run ``work`` on a daemon thread, which may outlive the loop; return a future of its end or error."""
        done: asyncio.Future[None] = self._loop.create_future()

        def finish(error: BaseException | None) -> None:
            if not done.done():
                done.set_exception(error) if error is not None else done.set_result(None)

        def run() -> None:
            error: Exception | None = None
            try:
                work()
            except Exception as caught:
                if not isinstance(caught, P2PTrainError):
                    logger.exception("training failed")
                error = caught
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(finish, error)

        threading.Thread(target=run, name="train", daemon=True).start()
        return done

    def cancel(self, reason: str = "the swarm is closing") -> None:
        """Cancel pending coroutines and refuse new ones, both with ``reason``; safe from any thread."""
        self._over = self._over or reason
        self._ended.set()
        for future in list(self._running):
            future.cancel()

    def sleep(self, seconds: float) -> None:
        """Sleep on the calling thread; `cancel` ends the sleep."""
        self._ended.wait(seconds)

    def is_over(self) -> bool:
        """True after `cancel`, or once the loop is closed."""
        return bool(self._over) or self._loop.is_closed()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the coroutine's result, or raise `TemporaryError` if the network closes; an interrupt cancels it."""
        return self.finish(self.start(coroutine))

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the coroutine, whose result `finish` returns; raise `TemporaryError` if the network is closed."""
        if self.is_over():
            coroutine.close()
            raise TemporaryError(f"{self._over or 'the swarm is closed'}: call Swarm.join again to go on")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        if self.is_over():  # `cancel` ran before the future was registered.
            future.cancel()
        return future

    def call_soon(self, callback: Callable[..., object], *values: object) -> None:
        """Call ``callback`` on the event loop soon; do nothing once the network is closed."""
        if not self.is_over():
            with contextlib.suppress(RuntimeError):  # The loop was closed after the check.
                self._loop.call_soon_threadsafe(callback, *values)

    def finish(self, future: Future[T]) -> T:
        """Wait for a future of `start`, as `wait` does."""
        try:
            while True:
                try:
                    return future.result(timeout=1.0)
                except FutureTimeoutError:
                    if future.done() or self._loop.is_closed():
                        raise
        except FutureCancelledError as error:
            raise TemporaryError(self._over or "the swarm is closing") from error
        except BaseException:
            future.cancel()
            raise
