"""Notifications of a service's state to systemd (``Type=notify``, see sd_notify(3)); no-op elsewhere."""

from __future__ import annotations

import contextlib
import os
import socket

VARIABLE = "NOTIFY_SOCKET"


def notify(state: str) -> bool:
    """Send a state such as ``READY=1`` or ``STOPPING=1``; return True if it was sent to a service manager."""
    path = os.environ.get(VARIABLE, "")
    if not path.startswith(("/", "@")):
        return False
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.settimeout(1.0)
        channel.sendto(state.encode(), "\0" + path[1:] if path.startswith("@") else path)
        return True
    return False
