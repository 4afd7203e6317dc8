"""When to open a relayed connection anew, so that the daemons try again to punch a hole.

Two private peers meet at a relay. The daemon of the one that was dialled then tries once to reach the other directly
(DCUtR, https://github.com/libp2p/specs/blob/master/relay/DCUtR.md): both dial at the same moment, and each gateway
takes what comes for an answer. That needs the address that its gateway gives it, and a daemon believes only what four
others have seen. Peers that have just joined try too early, and what stays relayed would stay so for ever.

The decision is here, the closing and dialling in `p2ptrain.node.contacts`.
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
        own_id: This peer; of two the one with the smaller id opens anew.
    """

    def __init__(self, own_id: str) -> None:
        self._own_id = own_id
        self._attempts: dict[str, _Attempts] = {}

    def due(self, connections: Mapping[str, Collection[str]], now: float) -> list[str]:
        """The peers whose connections should be opened anew now.

        Args:
            connections: By peer: the remote multiaddrs of all its connections.
            now: Seconds, on any clock that does not jump.
        """
        found = []
        for peer, addresses in connections.items():
            if self._own_id > peer or not all("/p2p-circuit" in address for address in addresses):
                self._attempts.pop(peer, None)
                continue
            attempts = self._attempts.setdefault(peer, _Attempts(0, now + FIRST_PAUSE_SECONDS, now))
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
