"""The `Transport` of a simulated peer: dials with latency, and handler tasks that the peer owns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2ptrain.errors import PeerError, PeerUnreachableError
from p2ptrain.network.simulated.streams import SimulatedStream
from p2ptrain.network.transport import PeerId, Stream, StreamHandler, Transport

if TYPE_CHECKING:
    from p2ptrain.network.simulated.network import SimulatedNetwork, SimulatedPeer

logger = logging.getLogger(__name__)


class SimulatedTransport(Transport):
    """Streams of one simulated peer; created by `SimulatedNetwork.add_peer`."""

    def __init__(self, network: SimulatedNetwork, peer: SimulatedPeer) -> None:
        self.peer_id = peer.peer_id
        self._network = network
        self._peer = peer
        self._handlers: dict[str, StreamHandler] = {}
        self._streams: dict[int, SimulatedStream] = {}
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._closed = False

    @property
    def num_streams(self) -> int:
        """Number of streams with an open end at this peer."""
        return sum(not stream.over for stream in self._streams.values())

    async def open(self, peer: PeerId, protocol: str, timeout_seconds: float, *, expected_bytes: int = 0) -> Stream:
        """See `Transport.open`; takes one round trip."""
        if self._closed:
            raise PeerUnreachableError(peer, "this peer's transport is closed")
        answer: asyncio.Future[SimulatedStream | None] = self._network.loop.create_future()
        self._network.dial(self._peer, peer, protocol, answer)
        try:
            async with asyncio.timeout(timeout_seconds):
                stream = await answer
        except TimeoutError:
            self._give_up(answer)
            raise PeerUnreachableError(peer, f"not reached within {timeout_seconds:g} s") from None
        except BaseException:
            self._give_up(answer)
            raise
        if stream is None:
            raise PeerUnreachableError(peer, f"refused the connection, or does not serve {protocol}")
        if stream.over:
            raise PeerUnreachableError(peer, "this peer's transport was closed while it dialled")
        return stream

    @staticmethod
    def _give_up(answer: asyncio.Future[SimulatedStream | None]) -> None:
        """Abort the stream of an abandoned dial; the network aborts a later one."""
        stream = answer.result() if answer.done() and not answer.cancelled() else None
        if stream is not None:
            stream.abort()

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        self._handlers[protocol] = handler

    async def connect(self, addresses: Sequence[str], timeout_seconds: float) -> PeerId:
        deadline = self._network.loop.time() + timeout_seconds
        for address in addresses:
            peer = address.rpartition("/p2p/")[2]
            left = deadline - self._network.loop.time()
            if left > 0 and await self._network.ping(self._peer, peer, left):
                return peer
        raise PeerUnreachableError("?", f"none of {len(addresses)} addresses answered within {timeout_seconds:g} s")

    async def addresses(self) -> list[str]:
        return [self._peer.address]

    async def close(self) -> None:
        self._closed = True
        tasks = [task for task in self._serving.values() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self.kill()

    # Called by the network

    def serves(self, protocol: str) -> bool:
        return protocol in self._handlers and not self._closed

    def attach(self, stream: SimulatedStream) -> None:
        """Register a stream with this peer at one end."""
        self._streams[stream.number] = stream

    def accept(self, stream: SimulatedStream, protocol: str) -> None:
        self.attach(stream)
        self._serving[stream.number] = self._peer.spawn(self._handle(self._handlers[protocol], stream))

    def kill(self) -> None:
        """End all streams as if the process died; the remotes see their ends."""
        self._closed = True
        self._handlers.clear()
        for stream in list(self._streams.values()):
            stream.abort()

    def detach(self, number: int) -> None:
        """Remove a stream whose end at this peer is closed."""
        self._streams.pop(number, None)

    async def _handle(self, handler: StreamHandler, stream: SimulatedStream) -> None:
        try:
            await handler(stream)
            await stream.close()
        except PeerError as error:
            logger.debug("a stream handler of %s gave up: %s", self._peer.name, error)
        finally:
            stream.abort()
            del self._serving[stream.number]
