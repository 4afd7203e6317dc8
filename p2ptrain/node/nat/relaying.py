"""Tests that a relay carries more than libp2p's default limit; peers test their relays, and relays test themselves.

The daemon runs two relay services under one protocol name. The service with the configured, generous limits starts
once the daemon knows that it is public. The service with libp2p's default limits (128 KiB a connection) starts at once.
The service that starts last answers.

So `Libp2pSettings` declares a relay public, and gives its daemon one thread: then the generous service starts last.
Nothing guarantees this order. A relay therefore tests itself and restarts until it passes. A private peer tests relays
before it announces them. Source: https://github.com/learning-at-home/go-libp2p-daemon (``relay.go``,
``EnableRelayV2`` in ``daemon.go``)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from p2ptrain.errors import P2PTrainError, PeerError, PeerLostError, ProtocolError
from p2ptrain.network.identity import Identity
from p2ptrain.network.libp2p.transport import Libp2pSettings, Libp2pTransport
from p2ptrain.network.reachability import scope, tcp_ports
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.schema import Nothing
from p2ptrain.node.nat.probing import CONTACT_SECONDS
from p2ptrain.runtime import Runtime

logger = logging.getLogger(__name__)

CARRY = "reach.carry"
CARRIED_BYTES = 512 * 1024
"""Bytes that a relay has to carry each way; > the 128 KiB at which libp2p's default relays cut a connection."""
PROOF_SECONDS = 8.0
RETRY_SECONDS = 0.2
RELAY_ATTEMPTS = 10
"""Limit of self-tests at start; nearly always the first one passes."""
RETRY_ATTEMPTS = 2
"""Limit of self-tests of each later retry: the running daemon, then a restarted one."""


def serve_carry(rpc: Rpc, is_carrier: Callable[[str], bool]) -> None:
    """Serve `CARRY`: echo the bytes that a carrier sends through a relay."""

    async def carry(channel: Channel, request: Nothing) -> None:
        if not is_carrier(channel.remote):
            raise ProtocolError(channel.remote, "is not asked to carry anything")
        try:
            await channel.send_bytes(await channel.receive_bytes(CARRIED_BYTES, PROOF_SECONDS))
        except PeerLostError as error:
            logger.debug("the relay cut the connection: %s", error)

    rpc.serve_channel(CARRY, Nothing, carry, max_request_bytes=64)


class Carrier:
    """A test peer that reaches another peer through relays. Make it with `carrier`."""

    def __init__(self, transport: Libp2pTransport, rpc: Rpc) -> None:
        self.peer_id = transport.peer_id
        self.transport = transport
        self.rpc = rpc

    async def why_not(self, relay: str, peer: str) -> str:
        """Return why the relay does not carry `CARRIED_BYTES` to ``peer`` and back; empty if it does."""
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                await self._carry(relay, peer)
            return ""
        except (P2PTrainError, TimeoutError) as error:
            return str(error) or f"not done within {PROOF_SECONDS:g} s"
        finally:
            await self.transport.disconnect(peer)

    async def _carry(self, relay: str, peer: str) -> None:
        """Echo `CARRIED_BYTES` over a relayed stream; retry until there is one. The caller sets a deadline.

        Daemons on one machine may also connect directly, and a new stream takes the shortest path. An open stream keeps
        its path.
        """
        while True:
            try:
                await self.transport.connect([f"{relay}/p2p-circuit/p2p/{peer}"], CONTACT_SECONDS)
            except PeerError:  # The peer has no reservation there yet.
                await asyncio.sleep(RETRY_SECONDS)
                continue
            async with self.rpc.open(peer, CARRY, Nothing(), CONTACT_SECONDS) as channel:
                if await self._is_relayed(peer):
                    await channel.send_bytes(bytes(CARRIED_BYTES))
                    await channel.receive_bytes(CARRIED_BYTES, PROOF_SECONDS)
                    return
            await self.transport.disconnect(peer)
            await asyncio.sleep(RETRY_SECONDS)

    async def _is_relayed(self, peer: str) -> bool:
        ways = [address for remote, address in await self.transport.connections() if remote == peer]
        return bool(ways) and all("/p2p-circuit" in address for address in ways)


@asynccontextmanager
async def carrier(runtime: Runtime, swarm: bytes, **settings: Any) -> AsyncIterator[Carrier]:
    """Yield a `Carrier` with a key and a daemon of its own, closed at the end of the block."""
    bare = {"listen": (), "direct": "off", "find_peers": False}
    with await asyncio.to_thread(Identity.ephemeral) as identity:
        transport = await Libp2pTransport.start(identity, Libp2pSettings(**{**bare, **settings}))
        try:
            rpc = Rpc(transport, runtime, swarm)
            yield Carrier(transport, rpc)
            await rpc.close()
        finally:
            await transport.close()


async def why_no_relay(transport: Libp2pTransport, runtime: Runtime, swarm: bytes) -> str:
    """Return why this peer's daemon does not relay data between two test peers; empty if it does."""
    near = await _address_here(transport)
    if not near:
        return "it listens at no TCP address"
    private = {
        "listen": ("/ip4/127.0.0.1/tcp/0",),  # without a listener, the reservation takes longer than `PROOF_SECONDS`
        "announce": (f"{near}/p2p-circuit",),
        "trusted_relays": (near,),
        "force_reachability": "private",
        "find_peers": True,
    }
    async with carrier(runtime, swarm) as stranger, carrier(runtime, swarm, **private) as target:
        serve_carry(target.rpc, lambda peer: peer == stranger.peer_id)
        await target.rpc.start()
        try:
            await target.transport.connect([near], CONTACT_SECONDS)
        except PeerError as error:
            return str(error)
        return await stranger.why_not(near, target.peer_id)


async def _address_here(transport: Libp2pTransport) -> str:
    """Return the address at which this machine dials the daemon; announced addresses may not lead back to it."""
    for address in transport.settings.listen:
        if tcp_ports([address]) and not address.endswith("/tcp/0"):
            here = address.replace("/0.0.0.0/", "/127.0.0.1/").replace("/ip6/::/", "/ip6/::1/")
            return f"{here}/p2p/{transport.peer_id}"
    told = [address for address in await transport.addresses() if tcp_ports([address])]
    return max(told, key=scope, default="")  # loopback, if it listens there
