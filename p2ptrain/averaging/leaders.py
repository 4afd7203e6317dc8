"""Who leads the round in progress: in order of rank, but a leader that failed goes to the end of the line.

Everybody in a group sees it break, so all its members pass over the same leader when they try again; one that was not
in it is sent on by the leader itself. Without that, one peer that leads badly, by malice or because somebody cannot
reach it, would hold up its round for ever: ranks change only with the round.

Who failed is each peer's own view, and views differ where a peer comes late or comes again: two may each take the other
for the leader, or both insist. Rank alone, which everybody agrees on, decides between two that hand in to each other
(`Conductor.settle_on`); and that a peer could not be reached counts only until it is.
"""

from __future__ import annotations

from collections import Counter

from p2ptrain.averaging.membership import Membership, rank

Key = tuple[int, bytes]
"""A round of a lineage."""

MAX_NUDGERS = 64
MAX_FAILED = 1024
MAX_TOLD = 16
MOST_BELIEVED = 3


class Leaders:
    """The candidates for one round after the other, seen from one peer; forgets a round when asked about another."""

    def __init__(self, own_id: str, membership: Membership) -> None:
        self._own_id = own_id
        self._membership = membership
        self._key: Key | None = None
        self._failures: Counter[str] = Counter()
        self._unreachable: set[str] = set()
        self._nudgers: set[str] = set()

    def _turn_to(self, key: Key) -> None:
        if key != self._key:
            self._key, self._failures, self._unreachable, self._nudgers = key, Counter(), set(), set()

    def failed(self, key: Key, leader: str) -> None:
        """Note that nothing came of a round that this peer led."""
        self._turn_to(key)
        if leader in self._failures or len(self._failures) < MAX_FAILED:
            self._failures[leader] += 1

    def told(self) -> dict[str, int]:
        """How often each leader of the round in progress failed, for a peer that comes new; bounded."""
        return dict(self._failures.most_common(MAX_TOLD))

    def learn(self, key: Key, failures: object) -> None:
        """Take over what another peer `told`, if this one saw nothing of the round itself; nonsense is ignored.

        Otherwise one that comes late would send the others back to leaders of which nothing came. A lie can make this
        peer follow the liar for an attempt or two; what it sees itself soon outweighs `MOST_BELIEVED` failures.
        """
        if not isinstance(failures, dict) or len(failures) > MAX_TOLD:
            return
        self._turn_to(key)
        if not self._failures and all(type(p) is str and type(n) is int and n > 0 for p, n in failures.items()):
            self._failures.update({peer: min(number, MOST_BELIEVED) for peer, number in failures.items()})

    def not_reached(self, key: Key, leader: str) -> None:
        """Note that a leader could not be asked."""
        self._turn_to(key)
        if len(self._unreachable) < MAX_FAILED:
            self._unreachable.add(leader)

    def unreachable(self, key: Key) -> set[str]:
        """Leaders of this round that could not be asked, and were not `reached` since."""
        return self._unreachable if key == self._key else set()

    def reached(self, peer: str) -> None:
        """Note that a peer answered or asked: it may have started again, and is connected now."""
        self._unreachable.discard(peer)

    def nudged_by(self, key: Key, peer: str) -> None:
        """Note that a peer is in this round, though no record may have told of it yet: it asked, or was in the last."""
        self._turn_to(key)
        self.reached(peer)
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
        failures = self._failures[peer] if key == self._key else 0
        return (failures + (peer in self.unreachable(key)), rank(peer, *key))

    def candidates(self, key: Key, excluded: list[str]) -> list[str]:
        """All that may lead, this peer among them, the first in line first.

        Also those that are not waited for: if peers that left each other out did not ask each other, they would go on
        as lone lineages for ever.
        """
        others = {*self._membership.alive_trainers(), *self.nudgers(key)}.difference(excluded)
        others = {peer for peer in others if not self._membership.is_convicted(peer)}
        return sorted({*others, self._own_id}, key=lambda peer: self.order(key, peer))
