"""A peer's process: stop signals (`StopSignals`, in a script `SigtermExit`), and its service manager (`notify`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from p2ptrain.node.guest.wishes import Wishes

logger = logging.getLogger(__name__)

FORCED_EXIT_CODE = 130
NOTIFY_VARIABLE = "NOTIFY_SOCKET"


class StopSignals:
    """SIGINT and SIGTERM request a drain; a second signal ends the process at once with code 130.

    ``requested`` is set when a drain is requested, for ``reason``. ``before_exit`` restores the terminal before an
    immediate exit. ``wishes`` are the reasons to pause in place of a stop.
    """

    def __init__(self, before_exit: Callable[[], None] = lambda: None) -> None:
        self.requested = asyncio.Event()
        self.reason = ""
        self.wishes = Wishes()
        self._before_exit = before_exit

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)

    def stop(self, reason: str) -> None:
        """Request a drain for a reason other than a signal."""
        self.reason = self.reason or reason
        self.requested.set()

    def _on_signal(self, number: int) -> None:
        if self.requested.is_set() and self.reason == "signal":
            logger.warning("stopping at once")
            self._before_exit()
            os._exit(FORCED_EXIT_CODE)
        logger.info("draining: the step in progress is finished; signal again to stop at once")
        self.reason = "signal"
        self.requested.set()


class SigtermExit:
    """Makes the first SIGTERM raise `SystemExit` in the main thread; a second one ends the process.

    By default SIGTERM ends the interpreter without closing ``with`` and ``finally`` blocks.
    """

    def __init__(self) -> None:
        self._is_closing = False
        self._is_late = False

    def install(self) -> None:
        """Handle SIGTERM, unless the script does or this is not the main thread, where Python cannot."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Delay a first SIGTERM to the end of the block, and restore the default handler."""
        self._is_closing = True
        try:
            yield
        finally:
            if signal.getsignal(signal.SIGTERM) == self._on_signal:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if self._is_late:
                raise SystemExit(128 + signal.SIGTERM)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._is_late = self._is_closing
        if not self._is_closing:
            raise SystemExit(128 + number)


def notify(state: str) -> bool:
    """Send a state such as ``READY=1`` or ``STOPPING=1`` to systemd (``Type=notify``, see sd_notify(3)).

    Return True if it was sent; without a service manager, do nothing.
    """
    path = os.environ.get(NOTIFY_VARIABLE, "")
    if not path.startswith(("/", "@")):
        return False
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.settimeout(1.0)
        channel.sendto(state.encode(), "\0" + path[1:] if path.startswith("@") else path)
        return True
    return False
