"""The seam between protocol code and bytes on a wire: streams between peers.

Implementations are `p2ptrain.network.libp2p.transport` (p2pd daemons) and `p2ptrain.network.simulated` (virtual time);
`p2ptrain.network.factory` starts the one that a peer's configuration names.
Protocol code does not use streams directly; it uses `p2ptrain.network.rpc.client`, which adds framing, heartbeats,
limits and deadlines on top of either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

PeerId = str
"""A libp2p peer id in base58 text (``Qm…``): the hash of the peer's public key."""


class Stream(ABC):
    """Ordered, reliable, back-pressured bytes between two peers; either side may write at any time.

    There is no half-close. A stream that ends says nothing about completeness: the layer above marks ends.
    """

    @property
    @abstractmethod
    def remote(self) -> PeerId:
        """The authenticated id of the peer at the other end."""

    @property
    @abstractmethod
    def num_arrived(self) -> int:
        """Bytes that arrived so far, those that nobody has read yet included: it grows while the remote is alive."""

    @abstractmethod
    async def write(self, *parts: bytes | bytearray | memoryview) -> None:
        """Queue all of ``parts``, in order, returning when the bounded send buffer has room again.

        They must not be changed until this returns.

        Raises:
            PeerLostError: The stream is gone.
        """

    @abstractmethod
    async def read(self, num_bytes: int) -> bytes:
        """Return exactly ``num_bytes`` bytes.

        Raises:
            PeerLostError: The stream ended first.
        """

    async def read_into(self, view: memoryview) -> None:
        """Fill ``view`` (writable, bytes) without a copy where possible; nobody else may use it meanwhile.

        Raises:
            PeerLostError: The stream ended first.
        """
        view[:] = await self.read(len(view))

    @abstractmethod
    async def close(self) -> None:
        """Flush what was written, for a bounded time, and end the stream; idempotent and never raises."""

    async def rest(self) -> None:
        """As `close`, of a stream on which nothing more is on its way in either direction, as both ends know.

        What carries it may carry another stream then.
        """
        await self.close()

    @abstractmethod
    def abort(self) -> None:
        """End the stream at once, dropping what is buffered; idempotent."""


StreamHandler = Callable[[Stream], Awaitable[None]]


class Transport(ABC):
    """Opens streams to peers by id and serves named protocols to them."""

    @property
    @abstractmethod
    def peer_id(self) -> PeerId:
        """This peer's own id."""

    @abstractmethod
    async def open(self, peer: PeerId, protocol: str, timeout_seconds: float, *, expected_bytes: int = 0) -> Stream:
        """Open a stream to ``peer`` for ``protocol`` (a name such as ``/p2ptrain/rpc``).

        Args:
            peer: Another peer.
            protocol: What it has to serve.
            timeout_seconds: Deadline.
            expected_bytes: About how many bytes will go over the stream, both ways together: a transport may have a way
                that is worth its price for many. 0 for few.

        Raises:
            PeerUnreachableError: It cannot be dialled within the time, or does not serve the protocol.
        """

    @abstractmethod
    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Run ``handler`` for every incoming stream of ``protocol``; the transport owns and cancels these tasks.

        The stream is aborted when the handler raises, and closed when it returns.
        """

    @abstractmethod
    async def connect(self, addresses: Sequence[str], timeout_seconds: float) -> PeerId:
        """Dial the first of the multiaddrs (each ending in ``/p2p/<id>``) that answers; return that peer's id.

        Raises:
            PeerUnreachableError: None answers within the time.
        """

    @abstractmethod
    async def addresses(self) -> list[str]:
        """The multiaddrs, each ending in ``/p2p/<id>``, at which this peer can be dialled now."""

    def on_lost(self, callback: Callable[[str], None]) -> None:  # noqa: B027 (many cannot be lost)
        """Have ``callback(reason)`` called on the event loop when no stream can be opened any more; at once if so."""

    @property
    def num_refused(self) -> int:
        """How many connections it refused, such as those of strangers."""
        return 0

    @abstractmethod
    async def close(self) -> None:
        """Stop serving, end all streams and the daemon if there is one; idempotent."""
