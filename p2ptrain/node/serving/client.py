"""Generation with a swarm's model, for a peer that takes no other part."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from p2ptrain.network.libp2p.settings import Libp2pSettings
from p2ptrain.network.link import SwarmLink
from p2ptrain.node.observe import LOOPBACK, client_peer
from p2ptrain.node.peer import Peer
from p2ptrain.pipeline.plan import stage_blocks
from p2ptrain.serving.client.routes import Host
from p2ptrain.serving.client.swarm import ServedModel, SwarmGenerator
from p2ptrain.tasks import Tasks

LOOK_SECONDS = 2.0
"""Interval of looks at the records of hosts."""


class SwarmModel:
    """A swarm's model, to generate with; made by `generating`."""

    def __init__(
        self, peer: Peer, blocks: tuple[tuple[int, int], ...], wait_seconds: float, audit_share: float = 0.0
    ) -> None:
        """``blocks`` has those of each stage: the first, and the one after its last."""
        manifest = peer.manifest
        model = ServedModel(manifest.name, manifest.model.vocabulary, manifest.model.hidden, blocks)
        self.peer = peer
        self.generator = SwarmGenerator(peer.rpc, peer.identity, model, self.hosts, wait_seconds, audit_share)

    def hosts(self) -> list[Host]:
        """Return the peers that serve a stage, by their records."""
        dials = self.peer.rpc.dial_seconds
        return [
            Host(peer, serving.served, dials.get(peer), drafts=(totals.drafted_tokens, totals.accepted_tokens))
            for held in self.peer.presence.book.held()
            if (serving := held.record.serving) is not None and serving.served is not None
            for peer, totals in [(held.record.peer, serving.totals)]
        ]

    def name_of(self, peer: str) -> str:
        """Return a host's name for people."""
        found = (held.record.label for held in self.peer.presence.book.held() if held.record.peer == peer)
        return next(found, peer[-8:])

    async def follow(self) -> None:
        """Keep the records fresh."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.peer.presence.refresh()


@contextlib.asynccontextmanager
async def generating(
    link: SwarmLink, wait_seconds: float = 30.0, audit_share: float = 0.0
) -> AsyncIterator[SwarmModel]:
    """Connect to a swarm for the block; a stage without a host is waited for ``wait_seconds``.

    ``audit_share`` of the answers are generated again on other hosts.

    Raises:
        BootstrapError: No peer of the link answers.
        ManifestError: A peer sent another manifest, or its model is not one that generates.
        NotAdmittedError: The swarm does not admit this peer.
    """
    network = Libp2pSettings(listen=LOOPBACK, directory=link.directory)
    async with client_peer(link, "client", network) as peer, Tasks() as tasks:
        await peer.entry.enter(link)
        model = SwarmModel(peer, await asyncio.to_thread(stage_blocks, peer.manifest), wait_seconds, audit_share)
        tasks.keep(model.follow, "records")
        tasks.keep(model.generator.auditor.run, "audits")
        yield model
