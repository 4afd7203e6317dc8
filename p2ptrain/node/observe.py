"""Looking at a swarm without taking part: what `p2ptrain status` and the live table of `up` are made of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType

from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.averaging.protocol.certificate_chain import fetch_certificates
from p2ptrain.errors import BootstrapError
from p2ptrain.manifest import Manifest, SignedManifest
from p2ptrain.network.identity import Identity
from p2ptrain.network.libp2p.transport import Libp2pSettings
from p2ptrain.network.link import SwarmLink
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.node.peer import Peer, PeerOptions
from p2ptrain.node.presence import DIRECTORY_TIMEOUT_SECONDS, LIFETIME_SECONDS
from p2ptrain.runtime import Runtime, real_runtime

FIRST_LOOK_SECONDS = 10.0


class Observer:
    """A light peer that reads the directory; use it as an asynchronous context manager."""

    def __init__(self, link: SwarmLink) -> None:
        """
        Args:
            link: Which swarm.
        """
        self._link = link
        self._runtime: Runtime | None = None
        self._peer: Peer | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Observer:
        """Meet the swarm.

        Raises:
            BootstrapError: Nobody that the link names answers.
        """
        self._runtime = real_runtime("observer")
        self._stack.callback(self._runtime.close)
        try:
            identity = self._stack.enter_context(Identity.ephemeral())
            network = Libp2pSettings(listen=("/ip4/127.0.0.1/tcp/0",), direct="off")
            options = PeerOptions("client", "observer", "cpu", None, network)
            self._peer = await Peer.start(identity, options, self._runtime, link=self._link)
            self._stack.push_async_callback(self._peer.close)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def manifest(self) -> Manifest:
        """What the swarm agreed on."""
        assert self._peer is not None
        return self._peer.manifest

    @property
    def signed(self) -> SignedManifest:
        """The manifest with its organizer's signature."""
        assert self._peer is not None
        return self._peer.signed

    @property
    def rejected(self) -> int:
        """Records that were dropped for what they say."""
        assert self._peer is not None
        return self._peer.presence.reader.rejected

    def on_network_lost(self, callback: Callable[[str], None]) -> None:
        """Have ``callback(reason)`` called on the event loop when the network daemon is gone for good."""
        assert self._peer is not None
        self._peer.on_network_lost(callback)

    def now(self) -> float:
        """Wall-clock second by the swarm's clock."""
        assert self._runtime is not None
        return self._runtime.now()

    async def look(self) -> list[tuple[PeerRecord, float]] | None:
        """The records of all peers and when each was published, ordered by peer id; None when nobody can be asked."""
        assert self._peer is not None
        records = await self._peer.presence.reader.read(DIRECTORY_TIMEOUT_SECONDS)
        if records is None:
            return None
        return [(record, expires_at - LIFETIME_SECONDS) for record, _, expires_at in records]

    async def certificates_after(self, peer: str, lineage: bytes) -> list[Certificate]:
        """The certificates that a peer holds which follow on a lineage, oldest first; verified.

        Raises:
            PeerError, DeadlineError: It failed.
            ProtocolError: It sent certificates that do not verify or do not connect.
        """
        assert self._peer is not None
        return await fetch_certificates(
            self._peer.rpc, peer, lineage, self._peer.swarm, self._peer.identity, proofs=True
        )

    async def peers(self) -> list[PeerRecord]:
        """The records of all peers now, ordered by peer id.

        Raises:
            BootstrapError: The directory does not answer.
        """
        assert self._peer is not None
        deadline = asyncio.get_running_loop().time() + FIRST_LOOK_SECONDS
        while True:
            records = await self._peer.presence.reader.read(DIRECTORY_TIMEOUT_SECONDS)
            if records is not None:
                return [record for record, _, _ in records]
            if asyncio.get_running_loop().time() >= deadline:
                raise BootstrapError("the swarm's directory does not answer: is its bootstrap peer still running?")
            await asyncio.sleep(0.5)


async def fetch_manifest(link: SwarmLink) -> SignedManifest:
    """Fetch and verify the manifest that a link names.

    Args:
        link: The swarm link.

    Raises:
        BootstrapError: Nobody that the link names answers.
        ManifestError: What peers sent is not the link's manifest.
    """
    async with Observer(link) as observer:
        return observer.signed
