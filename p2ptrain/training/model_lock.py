"""The lock on the live model, between the training thread and the event loop's side of a round.

When a round runs under compute (``training.overlap_steps``), the event loop's side needs the model twice: to read the
contribution, and to apply the result. It asks with `Rest.held`, and the training thread grants at the end of a step.
Without overlap the training thread waits for the whole round, so the model is free.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from p2ptrain.errors import TemporaryError

LOOK_SECONDS = 1.0
"""Poll interval for the end of the other side."""


class Rest:
    """The lock on the live model; the training thread takes it with `resume`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._training = False
        self._reserved = False
        self._held = False
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    # --- the training thread's side

    def park(self) -> None:
        """Release the model, and grant it to a waiting `held`."""
        with self._changed:
            self._training = False
            if self._waiting is not None:
                (loop, future), self._waiting = self._waiting, None
                self._held = True
                loop.call_soon_threadsafe(_grant, future)

    def resume(self, is_over: Callable[[], bool]) -> None:
        """Take the model; wait while it is held or reserved.

        Raises:
            TemporaryError: The event loop's side has ended (``is_over``) without releasing it.
        """
        with self._changed:
            while self._held or self._reserved:
                if not self._changed.wait(LOOK_SECONDS) and is_over():
                    raise TemporaryError("the swarm was closed during a round: call Swarm.join again to go on")
            self._training = True

    def reserve(self) -> None:
        """Give the model to the next `held`; call while the training thread is parked."""
        with self._changed:
            self._reserved = True

    def end_reservation(self) -> None:
        """Cancel `reserve` if no `held` came; safe from any thread."""
        with self._changed:
            self._reserved = False
            self._changed.notify_all()

    # --- the event loop's side

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold the model; waits for the end of the current step."""
        await self._take()
        try:
            yield
        finally:
            self._give_back()

    async def _take(self) -> None:
        with self._changed:
            if not self._training:
                self._reserved, self._held = False, True
                return
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            self._waiting = (loop, future)
        try:
            await future
        except asyncio.CancelledError:
            with self._changed:
                granted = self._waiting is None
                self._waiting = None
            if granted:
                self._give_back()
            raise

    def _give_back(self) -> None:
        with self._changed:
            self._held = False
            self._changed.notify_all()


def _grant(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
