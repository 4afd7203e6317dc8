"""A microbatch under way on a host, and those that wait for it: its caller, and who came again in that one's place."""

from __future__ import annotations

import asyncio
import contextlib

from p2ptrain.errors import P2PTrainError
from p2ptrain.pipeline.messages import BadMicrobatchError, MicrobatchId, Reply
from p2ptrain.pipeline.routing.hop import Tell

ORPHAN_SECONDS = 15.0
"""Timeout of a microbatch that no caller waits for: its caller's caller may send a substitute."""


class InFlight:
    """One microbatch.

    Args:
        id: Which.
        task: Takes it through.
    """

    def __init__(self, id: MicrobatchId, task: asyncio.Task[Reply]) -> None:
        self.task = task
        self._id = id
        self._askers: list[Tell] = []
        self._heard: list[tuple[int, str]] = []
        self._orphaned: asyncio.TimerHandle | None = None
        task.add_done_callback(lambda task: self._keep())

    def _keep(self) -> None:
        if self._orphaned is not None:
            self._orphaned.cancel()
            self._orphaned = None

    async def join(self, news: Tell) -> Reply:
        """Wait for it; it is given up `ORPHAN_SECONDS` after the last one that waited went away.

        Args:
            news: Told of every stage that is through with its forward, the past ones included.

        Raises:
            BadMicrobatchError: It was given up.
            P2PTrainError: What its task raises.
        """
        self._keep()
        self._askers.append(news)
        try:
            for stage, host in list(self._heard):
                await news(stage, host)
            return await asyncio.shield(self.task)
        except asyncio.CancelledError:
            if self.task.cancelled():
                raise BadMicrobatchError(f"{self._id} was given up") from None
            raise
        finally:
            self._askers.remove(news)
            if not self._askers and not self.task.done():
                self._orphaned = asyncio.get_running_loop().call_later(ORPHAN_SECONDS, self.task.cancel)

    async def tell(self, stage: int, host: str) -> None:
        """Tell all that wait that a host is through with a stage's forward."""
        self._heard.append((stage, host))
        for news in list(self._askers):
            with contextlib.suppress(P2PTrainError):  # One that is gone harms none of the others.
                await news(stage, host)
