"""Tells systemd the state of a service (``Type=notify``, see sd_notify(3)); elsewhere it does nothing."""

from __future__ import annotations

import contextlib
import os
import socket

VARIABLE = "NOTIFY_SOCKET"


def notify(state: str) -> bool:
    """Send a state such as ``READY=1`` or ``STOPPING=1``; True if a service manager took it."""
    path = os.environ.get(VARIABLE, "")
    if not path.startswith(("/", "@")):
        return False
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.settimeout(1.0)
        channel.sendto(state.encode(), "\0" + path[1:] if path.startswith("@") else path)
        return True
    return False
