"""Connections from a private peer to all trainers; other peers open streams to it over these, without a relay.

Two private peers meet at a relay. The dialled peer's daemon then tries once to connect directly (DCUtR,
https://github.com/libp2p/specs/blob/master/relay/DCUtR.md). Both daemons dial at the same moment, and each gateway
takes the incoming packets for an answer. For this a daemon needs its external address, which it trusts once four other
peers have observed it. Peers that have just joined try too early, and their daemons do not retry. So an idle relayed
connection is closed and redialled, at most `MAX_ATTEMPTS` times.

A dialable peer may open a stream to a private peer before the private peer has dialled it. The daemons then use the
relay, and would keep doing so. Only the private peer can change that; it redials at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.disk import WriteLog, replace_file
from p2ptrain.errors import P2PTrainError
from p2ptrain.network.libp2p.transport import Libp2pTransport
from p2ptrain.network.link import check_peer_address
from p2ptrain.network.reachability import Scope, scope
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.node.nat.probing import CONTACT_SECONDS
from p2ptrain.tasks import Backoff, together

logger = logging.getLogger(__name__)

MAX_CONTACTS = 64
MAX_KNOWN_ADDRESSES = 64
KNOWN_FILE = "known_peers.json"
CONTACT_PAUSE_SECONDS = 20.0
"""Pause before a retry of a peer that did not answer."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 8.0, 64.0
"""Backoff between redials of a relayed peer."""
MAX_ATTEMPTS = 4
_LONGEST_MEMORY_SECONDS = 600.0


@dataclass
class _Attempts:
    backoff: Backoff
    next_at: float
    seen_at: float
    made: int = 0


class HolePunching:
    """Redial attempts for relayed peers; of two private peers, the one with the smaller id redials."""

    def __init__(self, own_id: str) -> None:
        self._own_id = own_id
        self._attempts: dict[str, _Attempts] = {}

    def due(
        self, connections: Mapping[str, Collection[str]], now: float, *, dialable: Collection[str] = ()
    ) -> list[str]:
        """Return the peers to redial now.

        Args:
            connections: By peer: the remote multiaddrs of all its connections.
            now: Seconds on a monotonic clock.
            dialable: Peers that announce direct reachability.
        """
        found = []
        for peer, addresses in connections.items():
            is_ours = peer in dialable or self._own_id < peer
            if not is_ours or not all("/p2p-circuit" in address for address in addresses):
                self._attempts.pop(peer, None)
                continue
            if (attempts := self._attempts.get(peer)) is None:
                backoff = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS)
                first = backoff.next()
                attempts = self._attempts[peer] = _Attempts(backoff, now if peer in dialable else now + first, now)
            attempts.seen_at = now
            if attempts.made < MAX_ATTEMPTS and now >= attempts.next_at:
                found.append(peer)
        attempts_of = self._attempts.items()
        self._attempts = {peer: one for peer, one in attempts_of if now - one.seen_at < _LONGEST_MEMORY_SECONDS}
        return found

    def tried(self, peer: str, now: float) -> None:
        if attempts := self._attempts.get(peer):
            attempts.made += 1
            attempts.next_at = now + attempts.backoff.next()


class Contacts:
    """Keeps connections from a private peer to the trainers."""

    def __init__(self, transport: Callable[[], Libp2pTransport], rpc: Rpc, membership: Membership) -> None:
        self._transport = transport
        self._rpc = rpc
        self._membership = membership
        self._punching = HolePunching(rpc.peer_id)
        self._left_alone: dict[str, float] = {}
        """By peer: the earliest time of the next attempt."""

    async def keep(self) -> None:
        """Connect to trainers without a connection, up to `MAX_CONTACTS`; redial relayed connections that are due."""
        transport, now = self._transport(), asyncio.get_running_loop().time()
        connections: dict[str, list[str]] = {}
        for peer, address in await transport.connections():
            connections.setdefault(peer, []).append(address)
        others = [record for record in self._membership.records() if record.role != "bootstrap"]
        trainers = {record.peer: addresses for record in others if (addresses := dialable(record))}
        known = {peer: connections[peer] for peer in trainers if peer in connections}
        direct = {record.peer for record in others if record.reachability == "direct"}
        for peer in self._punching.due(known, now, dialable=direct):
            if not self._rpc.is_talking_with(peer):
                self._punching.tried(peer, now)
                await transport.disconnect(peer)
                del connections[peer]
        wanted = [peer for peer in trainers if peer not in connections and now >= self._left_alone.get(peer, 0.0)]

        async def contact(peer: str) -> None:
            try:
                await transport.connect(trainers[peer], CONTACT_SECONDS)
            except P2PTrainError as error:
                logger.debug("no connection with peer %s: %s", peer[-8:], error)
                self._left_alone[peer] = now + CONTACT_PAUSE_SECONDS

        await together("contact", map(contact, wanted[: max(0, MAX_CONTACTS - len(connections))]))
        self._left_alone = {peer: until for peer, until in self._left_alone.items() if until > now}


def dialable(record: PeerRecord) -> list[str]:
    """Return the addresses of another peer's record that this peer may dial: well-formed ones, without loopback."""
    return [address for address in record.addresses if is_well_formed(address) and scope(address) is not Scope.LOOPBACK]


def is_well_formed(address: str) -> bool:
    try:
        check_peer_address(address)
    except P2PTrainError:
        return False
    return True


class KnownPeers:
    """Addresses of peers, kept in a run directory: with them a peer joins while the swarm's bootstrap is down.

    Malformed ones are left out: other peers' records may hold any text, and a crash may damage the file.
    """

    def __init__(self, run_dir: Path | None) -> None:
        """``run_dir`` is None to keep nothing."""
        self._path = run_dir / KNOWN_FILE if run_dir is not None else None
        self._log = WriteLog("addresses of peers", self._path)

    def addresses(self) -> list[str]:
        """Return the addresses from earlier runs."""
        try:
            values = json.loads(self._path.read_text()) if self._path is not None else []
        except (OSError, ValueError):
            return []
        known = values if isinstance(values, list) else []
        return [value for value in known if isinstance(value, str) and is_well_formed(value)][:MAX_KNOWN_ADDRESSES]

    def remember(self, records: Iterable[PeerRecord]) -> None:
        """Save up to two addresses of each peer for the next start, if they changed; without any, keep the old file."""
        told = [address for record in records for address in record.addresses[:2]][:MAX_KNOWN_ADDRESSES]
        addresses = list(filter(is_well_formed, told))
        if self._path is not None and addresses and addresses != self.addresses():
            with contextlib.suppress(OSError), self._log.writing():
                replace_file(self._path, json.dumps(addresses).encode())
