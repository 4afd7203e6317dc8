"""A swarm's model for synchronous programs."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future

from p2ptrain.network.link import SwarmLink
from p2ptrain.node.serving.client import SwarmModel, generating
from p2ptrain.node.thread import LoopThread

CLOSE_SECONDS = 10.0
"""Timeout of leaving the swarm."""


class ModelThread:
    """A swarm's model on an event loop of its own, for a synchronous program; a context manager.

    Attributes:
        model: The model; set by ``__enter__``, which raises as `generating`.
        call: Runs a coroutine on the loop, and returns its result; an interruption cancels it.
    """

    model: SwarmModel

    def __init__(self, link: SwarmLink, wait_seconds: float = 30.0) -> None:
        self._thread = LoopThread()
        self.call = self._thread.call
        self._generating = generating(link, wait_seconds)
        self._close = asyncio.Event()
        self._holding: Future[None] | None = None

    def __enter__(self) -> ModelThread:
        opened: Future[SwarmModel] = Future()

        async def hold() -> None:
            try:
                async with self._generating as model:
                    opened.set_result(model)
                    await self._close.wait()
            except BaseException as error:
                if opened.done():
                    raise
                opened.set_exception(error)

        self._holding = asyncio.run_coroutine_threadsafe(hold(), self._thread.loop)
        try:
            self.model = opened.result()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._holding is not None
        self._thread.loop.call_soon_threadsafe(self._close.set)
        with contextlib.suppress(Exception):
            self._holding.result(CLOSE_SECONDS)
        self._thread.stop()
