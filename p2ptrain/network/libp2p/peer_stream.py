"""A `Stream` on one socket, to the daemon or to the peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2ptrain.errors import PeerLostError
from p2ptrain.network.libp2p.direct_records import SealedSocket
from p2ptrain.network.libp2p.socket_stream import SocketStream
from p2ptrain.network.transport import PeerId, Stream

CLOSE_SECONDS = 5.0


class PeerStream(Stream):
    """A stream on one socket; it maps socket errors to `PeerLostError`.

    ``on_end`` is called after this end has closed the stream, possibly repeatedly.
    """

    def __init__(self, remote: PeerId, socket: SocketStream, on_end: Callable[[PeerStream], None]) -> None:
        self.remote = remote
        self._on_end = on_end
        self._socket = socket
        self._closed = False
        self._is_given_back = False

    @property
    def num_arrived(self) -> int:
        return self._socket.num_arrived

    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        if self._closed or self._socket.is_closing:
            raise PeerLostError(self.remote, "the stream is closed; open another")
        try:
            await self._socket.write(*parts)
        except (OSError, RuntimeError) as error:
            raise PeerLostError(self.remote, "the stream broke while writing; open another") from error

    async def read(self, num_bytes: int) -> bytes:
        try:
            return await self._socket.read(num_bytes)
        except (OSError, EOFError) as error:
            raise PeerLostError(self.remote, "the stream ended before what was expected; open another") from error

    async def read_into(self, view: memoryview) -> None:
        try:
            await self._socket.read_into(view)
        except (OSError, EOFError) as error:
            raise PeerLostError(self.remote, "the stream ended before what was expected; open another") from error

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._socket.close()
        except (OSError, RuntimeError, TimeoutError):
            self._socket.abort()
        except BaseException:
            self._socket.abort()
            raise
        finally:
            self._on_end(self)

    async def rest(self) -> None:
        if not self._closed and isinstance(self._socket, SealedSocket) and self._socket.rest():
            self._closed = self._is_given_back = True
            self._on_end(self)
        else:
            await self.close()

    def abort(self) -> None:
        self._closed = True
        if not self._is_given_back:
            self._socket.abort()
        self._on_end(self)
