"""Schedule of hole punching: when to redial a relayed connection.

Two private peers meet at a relay. The dialled peer's daemon then tries once to connect directly (DCUtR,
https://github.com/libp2p/specs/blob/master/relay/DCUtR.md). Both daemons dial at the same moment, and each gateway
takes the incoming packets for an answer. For this a daemon needs its external address, which it trusts once four other
peers have observed it. Peers that have just joined try too early, and their daemons do not retry.

A dialable peer may open a stream to a private peer before the private peer has dialled it. The daemons then use the
relay, and would keep doing so. Only the private peer can change that; it redials at once.

This module only decides; `p2ptrain.node.nat.contacts` closes and dials.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

FIRST_PAUSE_SECONDS = 8.0
"""Pause before the first attempt; each later pause is twice as long."""
MAX_ATTEMPTS = 4
_LONGEST_MEMORY_SECONDS = 600.0


@dataclass
class _Attempts:
    made: int
    next_at: float
    seen_at: float


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
            first = now if peer in dialable else now + FIRST_PAUSE_SECONDS
            attempts = self._attempts.setdefault(peer, _Attempts(0, first, now))
            attempts.seen_at = now
            if attempts.made < MAX_ATTEMPTS and now >= attempts.next_at:
                found.append(peer)
        self._attempts = {
            peer: one for peer, one in self._attempts.items() if now - one.seen_at < _LONGEST_MEMORY_SECONDS
        }
        return found

    def tried(self, peer: str, now: float) -> None:
        """Record a redial of a peer."""
        attempts = self._attempts.get(peer)
        if attempts is not None:
            attempts.made += 1
            attempts.next_at = now + FIRST_PAUSE_SECONDS * 2**attempts.made
