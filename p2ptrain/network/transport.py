"""The transport interface: byte streams between peers.

Implementations: `libp2p.transport` (p2pd daemons) and `simulated` (virtual time); `factory` starts the configured one.
Protocol code uses `rpc.endpoint`, which adds framing, heartbeats, limits and deadlines to streams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

PeerId = str
"""A libp2p peer id in base58 text (``Qm…``): the hash of the peer's public key."""


class Stream(ABC):
    """A bidirectional, ordered, reliable byte stream with back-pressure.

    There is no half-close, and the end of a stream does not imply completeness. The layer above marks ends.

    Attributes:
        remote: The authenticated id of the peer at the other end.
    """

    remote: PeerId

    @property
    @abstractmethod
    def num_arrived(self) -> int:
        """Bytes received so far, read or not; its growth shows that the remote is alive."""

    @abstractmethod
    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        """Queue ``parts`` in order; return when the bounded send buffer has room again.

        The caller must not change ``parts`` before this returns. Raises `PeerLostError` on a broken stream.
        """

    async def read(self, num_bytes: int) -> bytes:
        """Return exactly ``num_bytes`` bytes; raise `PeerLostError` if the stream ends first."""
        whole = bytearray(num_bytes)
        await self.read_into(memoryview(whole))
        return bytes(whole)

    @abstractmethod
    async def read_into(self, view: memoryview) -> None:
        """Fill ``view`` (writable, bytes), without a copy where possible; raise as `read`.

        The caller must not use ``view`` meanwhile.
        """

    @abstractmethod
    async def close(self) -> None:
        """Flush for a bounded time and end the stream; idempotent and never raises."""

    @abstractmethod
    async def rest(self) -> None:
        """Close a stream without data in flight, as both ends know; its connection may carry another stream."""

    @abstractmethod
    def abort(self) -> None:
        """End the stream at once and drop buffered data; idempotent."""


StreamHandler = Callable[[Stream], Awaitable[None]]


class Transport(ABC):
    """Opens streams to peers by id and serves named protocols to them.

    Attributes:
        peer_id: This peer's own id.
    """

    peer_id: PeerId

    @abstractmethod
    async def open(self, peer: PeerId, protocol: str, timeout_seconds: float, *, expected_bytes: int = 0) -> Stream:
        """Open a stream to ``peer`` for ``protocol`` (a name such as ``/p2ptrain/rpc``).

        Args:
            expected_bytes: Estimate of the bytes in both directions together, by which the transport may choose a
                connection; 0 for few.

        Raises:
            PeerUnreachableError: The peer cannot be dialled before the timeout, or does not serve the protocol.
        """

    @abstractmethod
    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Run ``handler`` for every incoming stream of ``protocol``, in tasks that the transport owns and cancels.

        The transport aborts the stream if the handler raises, and closes it otherwise.
        """

    @abstractmethod
    async def connect(self, addresses: Sequence[str], timeout_seconds: float) -> PeerId:
        """Dial multiaddrs, each ending in ``/p2p/<id>``; return the id of the first peer that answers.

        Raises `PeerUnreachableError` if no address answers before the timeout.
        """

    @abstractmethod
    async def addresses(self) -> list[str]:
        """Return this peer's current multiaddrs, each ending in ``/p2p/<id>``."""

    async def hosts_of(self, peer: PeerId) -> list[str]:
        """Return the IP addresses from which a peer is connected; none if it came over a relay alone."""
        return []

    def on_lost(self, callback: Callable[[str], None]) -> None:  # noqa: B027 (many cannot be lost)
        """Call ``callback(reason)`` on the event loop once the transport is lost; at once if it is lost already."""

    @property
    def num_refused(self) -> int:
        """The number of refused connections."""
        return 0

    @abstractmethod
    async def close(self) -> None:
        """Stop serving, and end all streams and the transport's daemon, if any; idempotent."""
