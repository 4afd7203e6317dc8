"""The control socket of a running peer: ``control.sock`` in its run directory, for its owner alone.

A request is one line of JSON, such as ``{"do": "pause"}``; so is the answer. The socket's mode is 0600.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Literal, cast

import msgspec

from p2ptrain.errors import ConfigError, TemporaryError

logger = logging.getLogger(__name__)

SOCKET_FILE = "control.sock"
MAX_LINE_BYTES = 4096
MAX_CONNECTIONS = 8
SECONDS = 5.0
"""Timeout of a request, and of its answer."""


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``leave`` drains at once, ``finish`` after its round; ``look`` writes the totals."""

    do: Literal["look", "pause", "resume", "leave", "finish"]


class Answer(msgspec.Struct, frozen=True):
    """A peer's state after a request.

    Attributes:
        error: Why the request was refused; else empty.
        paused: All reasons for which it rests; empty while it works.
        state: In its record: a peer with a reason to rest is ``resting`` once its last round is handed in.
        leaves: When it leaves; empty if it was not asked to.
    """

    error: str = ""
    name: str = ""
    state: str = ""
    round: int = 0
    paused: str = ""
    leaves: str = ""


@contextlib.asynccontextmanager
async def serving_control(run_dir: Path, handle: Callable[[Request], Answer]) -> AsyncIterator[None]:
    """Answer requests for the block. Without a socket the peer runs on, and the log tells why.

    The identity's lock lets one peer use a run directory, so a socket that is there is stale.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path = run_dir / SOCKET_FILE
    try:
        with _near(run_dir) as folder:
            path.unlink(missing_ok=True)
            listener.bind(f"{folder}/{SOCKET_FILE}")
            path.chmod(0o600)  # Nobody can connect before `listen`.
    except OSError as error:
        listener.close()
        logger.warning("no control socket in %s (%s): stop this peer with SIGTERM", run_dir, error.strerror)
        yield
        return
    server = await asyncio.get_running_loop().create_unix_server(
        lambda: _Connection(handle), sock=listener, backlog=MAX_CONNECTIONS
    )
    try:
        yield
    finally:
        server.close()
        path.unlink(missing_ok=True)


class _Connection(asyncio.Protocol):
    """Answers one request of one line, and closes."""

    def __init__(self, handle: Callable[[Request], Answer]) -> None:
        self._handle = handle
        self._line = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass.
        self._timeout = asyncio.get_running_loop().call_later(SECONDS, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        self._line += data
        if b"\n" not in self._line and len(self._line) <= MAX_LINE_BYTES:
            return
        try:
            answer = self._handle(msgspec.json.decode(self._line.partition(b"\n")[0][:MAX_LINE_BYTES], type=Request))
        except msgspec.DecodeError as error:
            answer = Answer(error=f"this peer does not understand the request: {error}")
        self._transport.pause_reading()
        self._transport.write(msgspec.json.encode(answer) + b"\n")
        self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._timeout.cancel()


def ask(run_dir: Path, request: Request) -> Answer:
    """Send a request to the peer that runs in a directory, and return its answer.

    Raises:
        ConfigError: There is no such run, it is not running, or it is another user's; the peer refuses.
        TemporaryError: The peer does not answer in time.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: there is no such run directory")
    not_running = f"no peer runs in {run_dir}: start it again with the command that you started it with"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(SECONDS)
        try:
            with _near(run_dir) as folder:
                connection.connect(f"{folder}/{SOCKET_FILE}")
            connection.sendall(msgspec.json.encode(request) + b"\n")
            line = b""
            while not line.endswith(b"\n") and len(line) <= MAX_LINE_BYTES:
                if not (data := connection.recv(MAX_LINE_BYTES)):
                    break
                line += data
            answer = msgspec.json.decode(line, type=Answer)
        except PermissionError as error:
            raise ConfigError(f"the peer in {run_dir} is another user's: ask as that user") from error
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise ConfigError(not_running) from error
        except (TimeoutError, ConnectionError, msgspec.DecodeError) as error:
            raise TemporaryError(f"the peer in {run_dir} does not answer: try again, or end it with SIGTERM") from error
    if answer.error:
        raise ConfigError(f"the peer in {run_dir} refuses: {answer.error}")
    return answer


@contextlib.contextmanager
def _near(folder: Path) -> Iterator[str]:
    """Yield a short path of a folder: that of a socket has at most 107 bytes."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}" if Path("/proc/self/fd").is_dir() else str(folder)
    finally:
        os.close(descriptor)
