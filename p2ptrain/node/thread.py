"""An event loop on its own thread, for synchronous programs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

JOIN_SECONDS = 30.0


class LoopThread:
    """A uvloop event loop that runs until `stop`.

    The network daemon dies with the thread that started it, so this thread lives as long as the peer. It is a daemon
    thread, so a script that does not close its swarm can exit.
    """

    def __init__(self, name: str = "p2ptrain-network") -> None:
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._ready.wait()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None
        return self._loop

    def _run(self) -> None:
        import uvloop

        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            self._stopped = asyncio.Event()
            self._ready.set()
            await self._stopped.wait()

        uvloop.run(main())

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result; interrupting the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel the loop's tasks, end it, and join the thread; idempotent."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(JOIN_SECONDS)
