"""Connections that a private peer keeps with all trainers: others open streams to it over these, without a relay."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from p2ptrain.averaging.membership import Membership
from p2ptrain.errors import P2PTrainError
from p2ptrain.network.libp2p import Libp2pTransport
from p2ptrain.network.link import check_peer_address
from p2ptrain.network.reachability import Scope, scope
from p2ptrain.node.probing import CONTACT_SECONDS

logger = logging.getLogger(__name__)

MAX_CONTACTS = 64
CONTACT_PAUSE_SECONDS = 20.0
"""How long a peer that did not answer is left alone."""


class Contacts:
    """Connects to trainers, which cannot easily do it themselves.

    Args:
        transport: Returns the transport of now.
        membership: Who is there.
    """

    def __init__(self, transport: Callable[[], Libp2pTransport], membership: Membership) -> None:
        self._transport = transport
        self._membership = membership
        self._left_alone: dict[str, float] = {}
        """Until when, by peer."""

    async def keep(self) -> None:
        """Connect to trainers that this peer is not connected to, for as many as there may be connections.

        Raises:
            TemporaryError: The daemon does not answer.
        """
        transport, now = self._transport(), asyncio.get_running_loop().time()
        connected = set(await transport.connected_peers())
        wanted = {
            record.peer: addresses
            for record in self._membership.records()
            if record.role != "bootstrap" and record.peer not in connected
            if now >= self._left_alone.get(record.peer, 0.0)
            if (addresses := dialable(record.addresses))
        }
        chosen = list(wanted)[: max(0, MAX_CONTACTS - len(connected))]

        async def contact(peer: str) -> None:
            try:
                await transport.connect(wanted[peer], CONTACT_SECONDS)
            except P2PTrainError as error:
                logger.debug("no connection with peer %s: %s", peer[-8:], error)
                self._left_alone[peer] = now + CONTACT_PAUSE_SECONDS

        await asyncio.gather(*map(contact, chosen))
        self._left_alone = {peer: until for peer, until in self._left_alone.items() if until > now}


def dialable(addresses: Sequence[str]) -> list[str]:
    """Addresses from another peer's record that may be dialled from here; malformed ones and loopback are left out."""
    found = []
    for address in addresses:
        try:
            check_peer_address(address)
        except P2PTrainError:
            continue
        if scope(address) is not Scope.LOOPBACK:
            found.append(address)
    return found
