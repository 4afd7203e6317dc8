"""What a link can carry: a process that sends as many bytes as an averaging round over plain TCP, and nothing else.

Every peer has one connection to every other, sends the bytes of a part and of a mean on each, and is done when as much
has arrived from everybody. There is no encryption, no arithmetic, and no step that waits for another.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from typing import Any

from benchmarks.answers import say

DEADLINE_SECONDS = 120.0
PIECE_BYTES = 1 << 16


class Peer:
    """One end of all connections.

    Args:
        address: Where it listens; the port is the same everywhere, because every peer has an address of its own.
    """

    def __init__(self, address: str, port: int) -> None:
        self._port = port
        self._listener = socket.create_server((address, port))
        self._listener.settimeout(DEADLINE_SECONDS)
        self._outgoing: list[socket.socket] = []
        self._incoming: list[socket.socket] = []

    def meet(self, others: list[str]) -> None:
        """Connect to all others, and wait until they have."""
        for other in others:
            self._outgoing.append(socket.create_connection((other, self._port), DEADLINE_SECONDS))
        while len(self._incoming) < len(others):
            connection, _ = self._listener.accept()
            connection.settimeout(DEADLINE_SECONDS)
            self._incoming.append(connection)

    def exchange(self, num_bytes: int) -> dict[str, Any]:
        """Send so many bytes to each other peer, and receive as many of each."""
        failures: list[str] = []
        threads = [threading.Thread(target=_attempt, args=(_send, to, num_bytes, failures)) for to in self._outgoing]
        threads += [threading.Thread(target=_attempt, args=(_take, of, num_bytes, failures)) for of in self._incoming]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"failed": failures[0]} if failures else {"finished": time.monotonic()}

    def close(self) -> None:
        """Close everything."""
        for each in (*self._outgoing, *self._incoming, self._listener):
            each.close()


def _attempt(work: Any, connection: socket.socket, num_bytes: int, failures: list[str]) -> None:
    try:
        work(connection, num_bytes)
    except OSError as error:
        failures.append(str(error) or type(error).__name__)


def _send(connection: socket.socket, num_bytes: int) -> None:
    piece = bytes(PIECE_BYTES)
    for start in range(0, num_bytes, PIECE_BYTES):
        connection.sendall(piece[: num_bytes - start])


def _take(connection: socket.socket, num_bytes: int) -> None:
    room = bytearray(PIECE_BYTES)
    while num_bytes:
        taken = connection.recv_into(room, min(PIECE_BYTES, num_bytes))
        if not taken:
            raise ConnectionError("a peer ended the connection")
        num_bytes -= taken


def main() -> None:
    """Answer commands on stdin until it closes."""
    options = json.loads(sys.argv[1])
    peer = Peer(options["address"], options["port"])
    say(listening=True)
    for line in sys.stdin:
        arguments = json.loads(line)
        if arguments.pop("do") == "meet":
            peer.meet(**arguments)
            say(met=True)
        else:
            say(**peer.exchange(**arguments))
    peer.close()


if __name__ == "__main__":
    main()
