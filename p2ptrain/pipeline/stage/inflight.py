"""A microbatch in flight on a host, shared by its caller and the caller's substitutes."""

from __future__ import annotations

import asyncio
import contextlib

from p2ptrain.errors import P2PTrainError
from p2ptrain.pipeline.messages import BadMicrobatchError, MicrobatchId, Reply
from p2ptrain.pipeline.routing.hop import Tell

ORPHAN_SECONDS = 15.0
"""Timeout without a waiting caller; the caller's own caller may send a substitute."""


class InFlight:
    """One microbatch; ``task`` returns its reply."""

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
        """Wait for the reply; `ORPHAN_SECONDS` after the last waiting caller has gone, the task is cancelled.

        ``news`` is called with the progress at every stage, past progress included.

        Raises:
            BadMicrobatchError: It was given up.
            P2PTrainError: The task's error.
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
        """Tell all waiting callers that a host finished a stage's forward pass, or was called."""
        self._heard.append((stage, host))
        for news in list(self._askers):
            with contextlib.suppress(P2PTrainError):  # A caller that is gone does not affect the others.
                await news(stage, host)
