"""How a peer is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable

logger = logging.getLogger(__name__)

FORCED_EXIT_CODE = 130


class StopSignals:
    """SIGINT and SIGTERM ask for a drain; a second one ends the process at once with code 130.

    Attributes:
        requested: Set when it was asked for.
        reason: Why.
        before_exit: Called right before the process ends at once; to leave a terminal as it was.
    """

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.reason = ""
        self.before_exit: Callable[[], None] = lambda: None

    def install(self) -> None:
        """Take over both signals on the running loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)

    def stop(self, reason: str) -> None:
        """Ask for a drain for another reason."""
        self.reason = self.reason or reason
        self.requested.set()

    def _on_signal(self, number: int) -> None:
        if self.requested.is_set() and self.reason == "signal":
            logger.warning("stopping at once")
            self.before_exit()
            os._exit(FORCED_EXIT_CODE)
        logger.info("draining: the step in progress is finished; signal again to stop at once")
        self.reason = "signal"
        self.requested.set()
