"""Where a peer stands in matchmaking, and the probe by which peers tell each other.

Who leads the round in progress: in order of rank, but a leader that failed goes to the end of the line.

All members of a group see it break, so they pass over the same leader when they try again. A peer that was not in the
group is redirected by the leader itself. Without that, a peer that leads badly, by malice or because others cannot
reach it, would hold up its round for ever: ranks change only with the round.

Each peer has its own view of the failures, and views differ where a peer comes late or comes again: two may each take
the other for the leader, or both insist. Rank, on which all agree, decides between two that hand in to each other
(`p2ptrain.averaging.grouping.coordinator.Coordinator.settle_on`). Between two that both have followers, failures of
groups and rank decide (`Leaders.priority`), which they mostly see alike. That a peer could not be reached counts only
until it is reached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from p2ptrain.averaging.grouping.cells import Cells, Key
from p2ptrain.averaging.grouping.membership import Membership, rank
from p2ptrain.averaging.grouping.messages import MAX_GOSSIP, PROBE, Failures, Probe, ProbeReply
from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.errors import PeerUnreachableError
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.rpc.client import Rpc

LEAST_PROBE_SECONDS, MOST_PROBE_SECONDS = 3.0, 10.0


@dataclass
class RoundPosition:
    """Where this peer stands, for both sides of matchmaking.

    Attributes:
        head: Its head.
        peer: Its id.
        cells: Who averages where.
        participates: Whether it trains: a leader then waits for itself too.
        following: The group for which it handed in a ticket, and the leader.
        closing: The group that should be formed with what this peer has.
        running: The attempt that this peer is in: which group, its leader, and its members.
        on_close: Called each time that another peer says that the round in progress is to be closed.
    """

    head: Head
    peer: str
    cells: Cells
    participates: bool = field(default=False, init=False)
    following: tuple[Key, str] | None = field(default=None, init=False)
    closing: Key | None = field(default=None, init=False)
    running: tuple[Key, str, tuple[str, ...]] | None = field(default=None, init=False)
    on_close: Callable[[], None] = lambda: None

    @property
    def key(self) -> Key:
        """The group of level 0 in which it averages in the round in progress."""
        return self.cells.key_of(self.head, self.peer)

    @property
    def is_closing(self) -> bool:
        """Whether the round in progress should be closed with what this peer has."""
        return self.closing == self.key

    def is_of(self, key: Key) -> bool:
        """Return True if a group is one of the round in progress."""
        return key[:3] == (self.head.round, self.head.lineage, self.head.present)

    def is_ahead_of(self, head: Head) -> bool:
        """Return True if this peer is further on than a head, or on a lineage that wins: that round is over."""
        return is_ahead(self.head, head)

    def passed_over(self, key: Key, peer: str) -> list[str]:
        """Return the leader that leads no more for a peer with another ticket for a group: its attempt broke there.

        This peer may be in that attempt still. It must not redirect the other to the leader of a broken attempt.
        """
        if self.running is None or self.running[0] != key or peer not in self.running[2]:
            return []
        return [self.running[1]]

    def close(self, key: Key) -> None:
        """Close the round in progress with what this peer has, if it is this one."""
        if key == self.key:
            self.closing = key
            self.on_close()


def is_ahead(head: Head, other: Head) -> bool:
    """Return True if a head is of another lineage, or further on in the same, and wins over the other."""
    return head.lineage != other.lineage and head.outranks(other)


def probe_seconds(spec: AveragingSpec) -> float:
    """Return how long a peer may take to answer: a grace period, which fits the round trips of the swarm."""
    return min(max(LEAST_PROBE_SECONDS, spec.grace_seconds), MOST_PROBE_SECONDS)


async def probe(rpc: Rpc, peer: str, key: Key, timeout_seconds: float, *, closing: bool = False) -> ProbeReply:
    """Tell a peer that this one is in a round, and whether it is being closed; return where the peer stands.

    Raises:
        PeerError: It cannot be reached, refuses, or answers nonsense.
        DeadlineError: No answer in time.
    """
    return await rpc.call(peer, PROBE, Probe(key, closing), ProbeReply, timeout_seconds)


MAX_PROBERS = 64
MAX_FAILED = 1024
MOST_BELIEVED = 3


@dataclass
class _Seen:
    """What was seen of one group to be."""

    failures: Counter[str] = field(default_factory=Counter)
    detours: Counter[str] = field(default_factory=Counter)
    unreachable: set[str] = field(default_factory=set)
    probers: set[str] = field(default_factory=set)


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
        """Return the view of this group; an empty one if it is not the one that is remembered."""
        known, seen = self._seen.get(key.level, (None, _Seen()))
        return seen if known == key else _Seen()

    def failed(self, key: Key, leader: str) -> None:
        """Note that nothing came of a group that this peer led."""
        seen = self._turn_to(key)
        if leader in seen.failures or len(seen.failures) < MAX_FAILED:
            seen.failures[leader] += 1

    def redirect_loop(self, key: Key, leader: str) -> None:
        """Note that a leader redirected this peer to one further back in the line, or in circles."""
        seen = self._turn_to(key)
        if leader in seen.detours or len(seen.detours) < MAX_FAILED:
            seen.detours[leader] += 1

    def priority(self, key: Key, peer: str) -> tuple[int, bytes]:
        """As `order`, without what concerns this peer alone: detours, and which leaders it could not reach."""
        return (self._seen_of(key).failures[peer], rank(peer, key))

    def gossip(self, key: Key) -> Failures:
        """Return how often leaders of this group failed, for a peer that comes new; the worst ones."""
        return tuple(self._seen_of(key).failures.most_common(MAX_GOSSIP))

    def learn(self, key: Key, failures: Failures) -> None:
        """Take over another peer's `gossip`, if this one saw no failure in the round itself.

        Otherwise a peer that comes late would send the others back to leaders that failed. A lie can make this peer
        follow the liar for an attempt or two; its own view soon outweighs `MOST_BELIEVED` failures.
        """
        seen = self._turn_to(key)
        if not seen.failures:
            seen.failures.update({peer: min(number, MOST_BELIEVED) for peer, number in failures})

    def unanswered(self, key: Key, leader: str, error: Exception) -> None:
        """Note that a leader did not answer: it is a suspect, and last in line if it could not be reached."""
        self._membership.suspect(leader, str(error))
        self.lost(leader)
        if isinstance(error, PeerUnreachableError) and len(self._turn_to(key).unreachable) < MAX_FAILED:
            self._turn_to(key).unreachable.add(leader)

    def unreachable(self, key: Key) -> set[str]:
        """Leaders of this group that could not be asked, and were not `reached` since."""
        return self._seen_of(key).unreachable

    def reached(self, peer: str) -> None:
        """Note that a peer answered or asked: it may have started again, and is connected now."""
        for _, seen in self._seen.values():
            seen.unreachable.discard(peer)

    def probed_by(self, key: Key, peer: str) -> None:
        """Note that a peer is in this round, even if no record says so yet: it sent a probe, or was in the last one."""
        seen = self._turn_to(key)
        self.reached(peer)
        if len(seen.probers) < MAX_PROBERS:
            seen.probers.add(peer)

    def lost(self, peer: str) -> None:
        """Note that a peer does not answer; the membership knows only those that have a record."""
        for _, seen in self._seen.values():
            seen.probers.discard(peer)

    def probers(self, key: Key) -> set[str]:
        """Return the peers that are in this round by their own account."""
        return self._seen_of(key).probers

    def order(self, key: Key, peer: str) -> tuple[int, bytes]:
        """Return a peer's sort key in the line of leaders; the smallest leads."""
        seen = self._seen_of(key)
        return (seen.failures[peer] + seen.detours[peer] + (peer in seen.unreachable), rank(peer, key))

    def candidates(self, key: Key, excluded: Collection[str]) -> list[str]:
        """Return the peers of the cell that may lead, the first in line first; at least this peer.

        Absentees are among them: if peers that left each other out did not ask each other, they would go on as lone
        lineages for ever.
        """
        others = {*self._membership.alive_trainers(), *self.probers(key)}.difference(excluded)
        others = {peer for peer in others if not self._membership.is_convicted(peer)}
        there = {peer for peer in {*others, self._own_id} if self._cells.includes(key, peer)} or {self._own_id}
        return sorted(there, key=lambda peer: self.order(key, peer))

    def first(self, key: Key) -> str:
        """Return the peer to report to: the first in line that could be reached so far."""
        return self.candidates(key, self.unreachable(key))[0]
