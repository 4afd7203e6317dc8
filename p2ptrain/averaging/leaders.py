"""Who leads the round in progress: in order of rank, but a leader that failed goes to the end of the line.

Everybody in a group sees it break, so all its members pass over the same leader when they try again; one that was not
in it is sent on by the leader itself. Without that, one peer that leads badly, by malice or because somebody cannot
reach it, would hold up its round for ever: ranks change only with the round.
"""

from __future__ import annotations

from collections import Counter

from p2ptrain.averaging.membership import Membership, rank

Key = tuple[int, bytes]
"""A round of a lineage."""

MAX_NUDGERS = 64
MAX_FAILED = 1024


class Leaders:
    """The candidates for one round after the other, seen from one peer; forgets a round when asked about another."""

    def __init__(self, own_id: str, membership: Membership) -> None:
        self._own_id = own_id
        self._membership = membership
        self._key: Key | None = None
        self._failures: Counter[str] = Counter()
        self._nudgers: set[str] = set()

    def _turn_to(self, key: Key) -> None:
        if key != self._key:
            self._key, self._failures, self._nudgers = key, Counter(), set()

    def failed(self, key: Key, leader: str) -> None:
        """Note that nothing came of a round that this peer led."""
        self._turn_to(key)
        if leader in self._failures or len(self._failures) < MAX_FAILED:
            self._failures[leader] += 1

    def nudged_by(self, key: Key, peer: str) -> None:
        """Note that a peer is in this round, though no record may have told of it yet: it asked, or was in the last."""
        self._turn_to(key)
        if len(self._nudgers) < MAX_NUDGERS:
            self._nudgers.add(peer)

    def lost(self, peer: str) -> None:
        """Note that a peer does not answer; the membership knows only those that have a record."""
        self._nudgers.discard(peer)

    def nudgers(self, key: Key) -> set[str]:
        """Peers that are in this round by their own account."""
        return self._nudgers if key == self._key else set()

    def order(self, key: Key, peer: str) -> tuple[int, bytes]:
        """A peer's place in line; the smallest leads."""
        return (self._failures[peer] if key == self._key else 0, rank(peer, *key))

    def candidates(self, key: Key, excluded: list[str]) -> list[str]:
        """All that may lead, this peer among them, the first in line first.

        Also those that are not waited for: if peers that left each other out did not ask each other, they would go on
        as lone lineages for ever.
        """
        others = {*self._membership.alive_trainers(), *self.nudgers(key)}.difference(excluded)
        return sorted({*others, self._own_id}, key=lambda peer: self.order(key, peer))
