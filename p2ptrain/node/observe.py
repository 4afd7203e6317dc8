"""Observation of a swarm without taking part, for `p2ptrain status`, `up` and the monitor."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import TracebackType

from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.averaging.protocol.certificate_chain import fetch_certificates
from p2ptrain.errors import BootstrapError
from p2ptrain.manifest import SignedManifest
from p2ptrain.network.identity import Identity
from p2ptrain.network.libp2p.transport import Libp2pSettings
from p2ptrain.network.link import SwarmLink
from p2ptrain.network.records.record import Look, PeerRecord, Sighting
from p2ptrain.node.peer import Peer, PeerOptions
from p2ptrain.node.presence import DIRECTORY_TIMEOUT_SECONDS, LIFETIME_SECONDS
from p2ptrain.runtime import real_runtime

FIRST_LOOK_SECONDS = 10.0


class Observer:
    """A client peer that reads the directory; an asynchronous context manager, which sets ``peer`` on entry."""

    def __init__(self, link: SwarmLink) -> None:
        self.peer: Peer
        self._link = link
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Observer:
        """Connect to the swarm.

        Raises:
            BootstrapError: No peer of the link answers.
        """
        runtime = real_runtime("observer")
        self._stack.callback(runtime.close)
        try:
            identity = self._stack.enter_context(Identity.ephemeral())
            network = Libp2pSettings(listen=("/ip4/127.0.0.1/tcp/0",), direct="off")
            options = PeerOptions("client", "observer", "cpu", None, network)
            self.peer = await Peer.start(identity, options, runtime, link=self._link)
            self._stack.push_async_callback(self.peer.close)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def now(self) -> float:
        """Return the wall-clock second on the swarm's clock."""
        return self.peer.runtime.now()

    async def look(self) -> Look:
        """Return the current records of all peers, ordered by peer id."""
        reader = self.peer.presence.reader
        records = await reader.read(DIRECTORY_TIMEOUT_SECONDS)
        if records is None:
            return Look(self.now(), None, reader.rejected)
        seen = [Sighting(record, expires_at - LIFETIME_SECONDS) for record, _, expires_at in records]
        return Look(self.now(), seen, reader.rejected)

    async def certificates_after(self, peer: str, lineage: bytes) -> list[Certificate]:
        """Return a peer's verified certificates that follow on a lineage, oldest first.

        Raises:
            PeerError, DeadlineError: The request failed.
            ProtocolError: The certificates do not verify or do not connect.
        """
        own = self.peer
        return await fetch_certificates(own.rpc, peer, lineage, own.rpc.swarm, own.identity, proofs=True)

    async def peers(self) -> list[PeerRecord]:
        """Return the records of all peers, ordered by peer id; retry until the directory answers.

        Raises:
            BootstrapError: The directory does not answer within `FIRST_LOOK_SECONDS`.
        """
        deadline = asyncio.get_running_loop().time() + FIRST_LOOK_SECONDS
        while (look := await self.look()).sightings is None:
            if asyncio.get_running_loop().time() >= deadline:
                raise BootstrapError("the swarm's directory does not answer: is its bootstrap peer still running?")
            await asyncio.sleep(0.5)
        return [each.record for each in look.sightings]


async def fetch_manifest(link: SwarmLink) -> SignedManifest:
    """Fetch and verify the manifest that a link names.

    Raises:
        BootstrapError: No peer of the link answers.
        ManifestError: A peer sent another manifest.
    """
    async with Observer(link) as observer:
        return observer.peer.signed
