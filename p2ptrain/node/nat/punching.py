"""When to open a relayed connection anew, so that the daemons find a way without the relay.

Two private peers meet at a relay. The daemon of the one that was dialled then tries once to reach the other directly
(DCUtR, https://github.com/libp2p/specs/blob/master/relay/DCUtR.md): both dial at the same moment, and each gateway
takes what comes for an answer. That needs the address that its gateway gives it, and a daemon believes only what four
others have seen. Peers that have just joined try too early, and what stays relayed would stay so for ever.

A peer that can be dialled may open a stream to a private one before that one has dialled it: the daemons then take the
relay, see that they are connected, and would stay with it. Only the private peer can change that; it does so at once.

The decision is here, the closing and dialling in `p2ptrain.node.nat.contacts`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

FIRST_PAUSE_SECONDS = 8.0
"""How long a relayed connection is kept before the first attempt; each later pause is twice as long."""
MAX_ATTEMPTS = 4
_LONGEST_MEMORY_SECONDS = 600.0


@dataclass
class _Attempts:
    made: int
    next_at: float
    seen_at: float


class HolePunching:
    """Remembers which peers are reached only through a relay, and how often that was tried to change.

    Args:
        own_id: This peer; of two private ones the one with the smaller id opens anew.
    """

    def __init__(self, own_id: str) -> None:
        self._own_id = own_id
        self._attempts: dict[str, _Attempts] = {}

    def due(
        self, connections: Mapping[str, Collection[str]], now: float, *, dialable: Collection[str] = ()
    ) -> list[str]:
        """The peers whose connections should be opened anew now.

        Args:
            connections: By peer: the remote multiaddrs of all its connections.
            now: Seconds, on any clock that does not jump.
            dialable: The peers that can be reached without a relay, by what they say themselves.
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
        """Note that a peer's connection was opened anew."""
        attempts = self._attempts.get(peer)
        if attempts is not None:
            attempts.made += 1
            attempts.next_at = now + FIRST_PAUSE_SECONDS * 2**attempts.made
