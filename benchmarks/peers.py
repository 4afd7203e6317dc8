"""A peer on loopback with everything up to `Rpc`, for benchmarks of what is above it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchmarks.answers import hear, say
from p2ptrain.network.identity import Identity
from p2ptrain.network.libp2p.transport import Libp2pSettings, Libp2pTransport
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.runtime import Runtime, real_runtime

SWARM = b"benchmark swarm".ljust(32, b".")
CONNECT_SECONDS = 30.0


@dataclass(frozen=True)
class LoopbackPeer:
    """A real daemon, a new identity, and an `Rpc` that is not started yet."""

    identity: Identity
    transport: Libp2pTransport
    runtime: Runtime
    rpc: Rpc

    async def meet(self) -> list[str]:
        """Tell the parent how to dial this peer, hear about all peers, and dial the others; returns all ids."""
        say(peer=self.rpc.peer_id, addresses=await self.transport.addresses())
        everyone = json.loads(await hear())
        for other in everyone:
            if other["peer"] != self.rpc.peer_id:
                await self.transport.connect(other["addresses"], CONNECT_SECONDS)
        say(met=len(everyone))
        return [other["peer"] for other in everyone]


@asynccontextmanager
async def loopback_peer(listen: str = "/ip4/127.0.0.1/tcp/0") -> AsyncIterator[LoopbackPeer]:
    """Start a peer, and end it with this context.

    Args:
        listen: Where; in a network namespace, another address.
    """
    runtime = real_runtime()
    with Identity.ephemeral() as identity:
        transport = await Libp2pTransport.start(identity, Libp2pSettings(listen=(listen,)))
        rpc = Rpc(transport, runtime, SWARM)
        try:
            yield LoopbackPeer(identity, transport, runtime, rpc)
        finally:
            await rpc.close()
            await transport.close()
            runtime.close()
