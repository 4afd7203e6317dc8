"""Observation of a swarm without taking part, for `p2ptrain status`, `up` and the monitor."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial

from p2ptrain.averaging.protocol.certificate import Certificate, fetch_certificates
from p2ptrain.errors import BootstrapError
from p2ptrain.manifest import SignedManifest
from p2ptrain.network.identity import Identity
from p2ptrain.network.libp2p.settings import Libp2pSettings
from p2ptrain.network.link import SwarmLink
from p2ptrain.network.records.record import Look, PeerRecord, Sighting
from p2ptrain.node.options import PeerOptions
from p2ptrain.node.peer import Peer
from p2ptrain.runtime import real_runtime

FIRST_LOOK_SECONDS = 10.0
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


def known_to(peer: Peer, answers: bool) -> Look:
    """Return the records that a peer holds, ordered by peer id; without sightings unless the directory ``answers``."""
    now, book = peer.runtime.now(), peer.presence.book
    seen = [Sighting(held.record, min(now, held.sequence / 1000)) for held in book.held()]
    return Look(now, seen if answers else None, book.rejected)


class Observer:
    """A client peer that exchanges records and publishes none; made by `observing`."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    async def look(self) -> Look:
        """Return the current records of all peers, ordered by peer id."""
        return known_to(self.peer, await self.peer.presence.refresh())

    async def certificates_after(self, peer: str, lineage: bytes) -> list[Certificate]:
        """Return a peer's verified certificates that follow on a lineage, oldest first; see `fetch_certificates`."""
        own = self.peer
        read = partial(Certificate.from_bytes, swarm=own.rpc.swarm, verifier=own.identity)
        return await fetch_certificates(own.rpc, peer, {lineage: None}, read, proofs=True)

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


@contextlib.asynccontextmanager
async def observing(link: SwarmLink) -> AsyncIterator[Observer]:
    """Connect to a swarm for the block.

    Raises:
        BootstrapError: No peer of the link answers.
        ManifestError: A peer sent another manifest.
    """
    async with client_peer(link, "observer", Libp2pSettings(listen=LOOPBACK, direct="off")) as peer:
        yield Observer(peer)


@contextlib.asynccontextmanager
async def client_peer(link: SwarmLink, name: str, network: Libp2pSettings) -> AsyncIterator[Peer]:
    """Connect a read-only peer with a key of its own for the block; raise as `observing`."""
    options = PeerOptions("client", name, "cpu", None, network)
    with contextlib.closing(real_runtime(name)) as runtime, Identity.ephemeral() as identity:
        peer = await Peer.start(identity, options, runtime, link=link)
        try:
            yield peer
        finally:
            await peer.close()


async def fetch_manifest(link: SwarmLink) -> SignedManifest:
    """Fetch and verify the manifest that a link names; raise as `observing`."""
    async with observing(link) as observer:
        return observer.peer.signed
