"""Proving that a relay carries more than a trickle, for peers that use one and for peers that are one.

The daemon runs two relay services that compete for one protocol name: one with the generous limits that it was given,
which starts once the daemon knows itself to be public, and one with libp2p's default limits (128 KiB a connection),
which starts at once. The one that starts last answers. So a relay is told that it is public (in a swarm of private
peers it may never find out), and has one thread: the generous service was the last in 32 of 32 starts then, busy
machine or not, and in 0 to 2 of 10 with more threads. One thread carries 180 MB/s. As this is nowhere promised, a relay
tries itself and is started again until it carries, and a private peer tries the relays that it is about to announce.
Source: https://github.com/learning-at-home/go-libp2p-daemon (``relay.go``, ``EnableRelayV2`` in ``daemon.go``)
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
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.network.schema import Nothing
from p2ptrain.runtime import Runtime

logger = logging.getLogger(__name__)

CARRY = "reach.carry"
CARRIED_BYTES = 512 * 1024
"""What a relay has to carry each way before it is believed; libp2p's default relays cut after 128 KiB."""
PROOF_SECONDS = 8.0
DIAL_SECONDS = 5.0
RETRY_SECONDS = 0.2
RELAY_ATTEMPTS = 10
"""Nearly always the first is enough; one takes about a second."""


def relay_settings(settings: Libp2pSettings) -> Libp2pSettings:
    """Return ``settings``; a relay's with those that let it carry data."""
    if settings.relay and settings.force_reachability is None:
        return settings.changed(force_reachability="public")
    return settings


@asynccontextmanager
async def _stranger(runtime: Runtime, swarm: bytes, **settings: Any) -> AsyncIterator[tuple[Libp2pTransport, Rpc]]:
    """Start a daemon of this process with a new key."""
    with await asyncio.to_thread(Identity.ephemeral) as identity:
        bare = {"listen": (), "direct": "off"}
        transport = await Libp2pTransport.start(identity, Libp2pSettings(**{**bare, **settings}))
        try:
            rpc = Rpc(transport, runtime, swarm)
            yield transport, rpc
            await rpc.close()
        finally:
            await transport.close()


def serve_carry(rpc: Rpc, is_carrier: Callable[[str], bool]) -> None:
    """Send back what a carrier sends through a relay."""

    async def carry(channel: Channel, request: Nothing) -> None:
        if not is_carrier(channel.remote):
            raise ProtocolError(channel.remote, "is not asked to carry anything")
        try:
            await channel.send_bytes(await channel.receive_bytes(CARRIED_BYTES, PROOF_SECONDS))
        except PeerLostError as error:
            logger.debug("the relay cut the connection: %s", error)

    rpc.serve_channel(CARRY, Nothing, carry, max_request_bytes=64)


class Carrier:
    """A stranger that reaches a peer through relays. Make it with `carrier`."""

    def __init__(self, transport: Libp2pTransport, rpc: Rpc) -> None:
        self.peer_id = transport.peer_id
        self._transport = transport
        self._rpc = rpc

    async def why_not(self, relay: str, peer: str) -> str:
        """Return why the relay at an address does not carry `CARRIED_BYTES` to ``peer`` and back; else empty."""
        try:
            async with asyncio.timeout(PROOF_SECONDS):
                await self._carry(relay, peer)
            return ""
        except (P2PTrainError, TimeoutError) as error:
            return str(error) or f"not done within {PROOF_SECONDS:g} s"
        finally:
            await self._transport.disconnect(peer)

    async def _carry(self, relay: str, peer: str) -> None:
        """Send and get back `CARRIED_BYTES`, trying until it went over a relay; the caller sets a deadline.

        A daemon on the same machine may be dialled directly, too, and a new stream takes the shortest way; one that was
        opened before stays where it is.
        """
        while True:
            try:
                await self._transport.connect([f"{relay}/p2p-circuit/p2p/{peer}"], DIAL_SECONDS)
            except PeerError:  # the peer has no place there yet
                await asyncio.sleep(RETRY_SECONDS)
                continue
            async with self._rpc.open(peer, CARRY, Nothing(), DIAL_SECONDS) as channel:
                if await self._is_relayed(peer):
                    await channel.send_bytes(bytes(CARRIED_BYTES))
                    await channel.receive_bytes(CARRIED_BYTES, PROOF_SECONDS)
                    return
            await self._transport.disconnect(peer)
            await asyncio.sleep(RETRY_SECONDS)

    async def _is_relayed(self, peer: str) -> bool:
        ways = [address for remote, address in await self._transport.connections() if remote == peer]
        return bool(ways) and all("/p2p-circuit" in address for address in ways)


@asynccontextmanager
async def carrier(runtime: Runtime, swarm: bytes) -> AsyncIterator[Carrier]:
    """A `Carrier` for as long as the block runs."""
    async with _stranger(runtime, swarm, find_peers=False) as (transport, rpc):
        yield Carrier(transport, rpc)


async def why_no_relay(transport: Libp2pTransport, runtime: Runtime, swarm: bytes) -> str:
    """Return why this peer's own daemon does not carry data between two strangers; empty when it does.

    Raises:
        ResourceError: No further daemon can be started.
    """
    near = await _address_here(transport)
    if not near:
        return "it listens at no TCP address"
    private = {
        "listen": ("/ip4/127.0.0.1/tcp/0",),  # a daemon that listens nowhere takes ten seconds to get a place
        "announce": (f"{near}/p2p-circuit",),
        "trusted_relays": (near,),
        "force_reachability": "private",
    }
    async with carrier(runtime, swarm) as stranger, _stranger(runtime, swarm, **private) as (target, rpc):
        serve_carry(rpc, lambda peer: peer == stranger.peer_id)
        await rpc.start()
        try:
            await target.connect([near], DIAL_SECONDS)
        except PeerError as error:
            return str(error)
        return await stranger.why_not(near, target.peer_id)


async def _address_here(transport: Libp2pTransport) -> str:
    """Return the address at which this machine dials a daemon; announced addresses may not lead back to it."""
    fixed = [
        address for address in transport.settings.listen if tcp_ports([address]) and not address.endswith("/tcp/0")
    ]
    here = [address.replace("/0.0.0.0/", "/127.0.0.1/").replace("/ip6/::/", "/ip6/::1/") for address in fixed]
    if here:
        return f"{here[0]}/p2p/{transport.peer_id}"
    told = [address for address in await transport.addresses() if tcp_ports([address])]
    return max(told, key=scope, default="")  # loopback, if it listens there
