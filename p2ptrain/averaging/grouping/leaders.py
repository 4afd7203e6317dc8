"""Who leads the round in progress: in order of rank, but a leader that failed goes to the end of the line.

Everybody in a group sees it break, so all its members pass over the same leader when they try again; one that was not
in it is sent on by the leader itself. Without that, one peer that leads badly, by malice or because somebody cannot
reach it, would hold up its round for ever: ranks change only with the round.

Who failed is each peer's own view, and views differ where a peer comes late or comes again: two may each take the other
for the leader, or both insist. Rank alone, which everybody agrees on, decides between two that hand in to each other
(`Conductor.settle_on`). Between two that both have followers, failures of groups and rank decide (`Leaders.merit`),
which they mostly see alike. That a peer could not be reached counts only until it is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from p2ptrain.averaging.grouping.cells import Cells, Key
from p2ptrain.averaging.grouping.membership import Membership, rank

MAX_NUDGERS = 64
MAX_FAILED = 1024
MAX_TOLD = 16
MOST_BELIEVED = 3


@dataclass
class _Seen:
    """What was seen of one group to be."""

    failures: Counter[str] = field(default_factory=Counter)
    detours: Counter[str] = field(default_factory=Counter)
    unreachable: set[str] = field(default_factory=set)
    nudgers: set[str] = field(default_factory=set)


class Leaders:
    """The candidates for one round after the other, seen from one peer.

    Of each level of the tree it remembers one group, and forgets it when it is told of another.
    """

    def __init__(self, own_id: str, membership: Membership, cells: Cells) -> None:
        self._own_id = own_id
        self._membership = membership
        self._cells = cells
        self._seen: dict[int, tuple[Key, _Seen]] = {}

    def _turn_to(self, key: Key) -> _Seen:
        if key.level not in self._seen or self._seen[key.level][0] != key:
            self._seen[key.level] = (key, _Seen())
        return self._seen[key.level][1]

    def _seen_of(self, key: Key) -> _Seen:
        """What was seen of this group; nothing of one that was not turned to."""
        known, seen = self._seen.get(key.level, (None, _Seen()))
        return seen if known == key else _Seen()

    def failed(self, key: Key, leader: str) -> None:
        """Note that nothing came of a group that this peer led."""
        seen = self._turn_to(key)
        if leader in seen.failures or len(seen.failures) < MAX_FAILED:
            seen.failures[leader] += 1

    def led_astray(self, key: Key, leader: str) -> None:
        """Note that a leader sent this peer to one further back in the line, or in circles."""
        seen = self._turn_to(key)
        if leader in seen.detours or len(seen.detours) < MAX_FAILED:
            seen.detours[leader] += 1

    def merit(self, key: Key, peer: str) -> tuple[int, bytes]:
        """As `order`, without what concerns this peer alone: detours, and whom it could not reach."""
        return (self._seen_of(key).failures[peer], rank(peer, key))

    def told(self, key: Key) -> dict[str, int]:
        """How often each leader of this group failed, for a peer that comes new; bounded."""
        return dict(self._seen_of(key).failures.most_common(MAX_TOLD))

    def learn(self, key: Key, failures: object) -> None:
        """Take over what another peer `told`, if this one saw nothing of the round itself; nonsense is ignored.

        Otherwise one that comes late would send the others back to leaders of which nothing came. A lie can make this
        peer follow the liar for an attempt or two; what it sees itself soon outweighs `MOST_BELIEVED` failures.
        """
        if not isinstance(failures, dict) or len(failures) > MAX_TOLD:
            return
        seen = self._turn_to(key)
        if not seen.failures and all(type(p) is str and type(n) is int and n > 0 for p, n in failures.items()):
            seen.failures.update({peer: min(number, MOST_BELIEVED) for peer, number in failures.items()})

    def not_reached(self, key: Key, leader: str) -> None:
        """Note that a leader could not be asked."""
        seen = self._turn_to(key)
        if len(seen.unreachable) < MAX_FAILED:
            seen.unreachable.add(leader)

    def unreachable(self, key: Key) -> set[str]:
        """Leaders of this group that could not be asked, and were not `reached` since."""
        return self._seen_of(key).unreachable

    def reached(self, peer: str) -> None:
        """Note that a peer answered or asked: it may have started again, and is connected now."""
        for _, seen in self._seen.values():
            seen.unreachable.discard(peer)

    def nudged_by(self, key: Key, peer: str) -> None:
        """Note that a peer is in this round, though no record may have told of it yet: it asked, or was in the last."""
        seen = self._turn_to(key)
        self.reached(peer)
        if len(seen.nudgers) < MAX_NUDGERS:
            seen.nudgers.add(peer)

    def lost(self, peer: str) -> None:
        """Note that a peer does not answer; the membership knows only those that have a record."""
        for _, seen in self._seen.values():
            seen.nudgers.discard(peer)

    def nudgers(self, key: Key) -> set[str]:
        """Peers that are in this round by their own account."""
        return self._seen_of(key).nudgers

    def order(self, key: Key, peer: str) -> tuple[int, bytes]:
        """A peer's place in line; the smallest leads."""
        seen = self._seen_of(key)
        return (seen.failures[peer] + seen.detours[peer] + (peer in seen.unreachable), rank(peer, key))

    def candidates(self, key: Key, excluded: list[str]) -> list[str]:
        """All that may lead, the first in line first: those of the cell, and at least this peer.

        Also those that are not waited for: if peers that left each other out did not ask each other, they would go on
        as lone lineages for ever.
        """
        others = {*self._membership.alive_trainers(), *self.nudgers(key)}.difference(excluded)
        others = {peer for peer in others if not self._membership.is_convicted(peer)}
        there = {peer for peer in {*others, self._own_id} if self._cells.includes(key, peer)} or {self._own_id}
        return sorted(there, key=lambda peer: self.order(key, peer))
