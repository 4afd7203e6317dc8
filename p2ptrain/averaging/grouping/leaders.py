"""The round in progress as this peer sees it: its head, and the peers that may lead its group.

Peers lead in the order of `rank`, which changes with each round. A leader that failed goes to the end: its followers
saw the group break, and all skip it in the next attempt. A peer that was not in the group is redirected by the leader
that took over.

Views of failures differ, so two peers may each follow the other, or both claim to lead. Between two peers that sent
each other tickets, rank decides (`p2ptrain.averaging.grouping.coordinator.Coordinator.follow`). Between two that both
have followers, failures of groups and rank decide (`Leaders.priority`); peers mostly agree on those.
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
from p2ptrain.network.rpc.endpoint import Rpc

LEAST_PROBE_SECONDS, MOST_PROBE_SECONDS = 3.0, 10.0
MAX_PROBERS = 64
MAX_FAILED = 1024
MOST_BELIEVED = 3


@dataclass
class RoundPosition:
    """The position of this peer among the rounds, shared by both sides of matchmaking.

    Attributes:
        peer: This peer's id.
        participates: True if this peer trains; then it also waits for itself as a leader.
        following: The group and the leader to which it sent a ticket.
        closing: The group that should form with the work that this peer has.
        running: The group, leader and members of the attempt that this peer is in.
        on_close: Called each time another peer says that the round in progress closes.
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
        """This peer's group on level 0 in the round in progress."""
        return self.cells.key_of(self.head, self.peer)

    @property
    def is_closing(self) -> bool:
        """True if this peer should hand in its work for the round in progress."""
        return self.closing == self.key

    def is_of(self, key: Key) -> bool:
        """True if a group belongs to the round in progress."""
        return key[:3] == (self.head.round, self.head.lineage, self.head.present)

    def is_ahead_of(self, head: Head) -> bool:
        """True if this peer's head wins over another one, whose round is then over."""
        return is_ahead(self.head, head)

    def broken_leaders(self, key: Key, peer: str) -> list[str]:
        """Return the leader of this peer's running attempt, if ``peer`` sends a new ticket: there the attempt broke."""
        if self.running is None or self.running[0] != key or peer not in self.running[2]:
            return []
        return [self.running[1]]

    def close(self, key: Key) -> None:
        """Close the round in progress with the work that this peer has, if ``key`` is its group."""
        if key == self.key:
            self.closing = key
            self.on_close()


def is_ahead(head: Head, other: Head) -> bool:
    """True if ``head`` is later in the same lineage, or of one that wins."""
    return head.lineage != other.lineage and head.outranks(other)


def probe_seconds(spec: AveragingSpec) -> float:
    """Return the timeout of a probe: a grace period, which fits the swarm's round trips."""
    return min(max(LEAST_PROBE_SECONDS, spec.grace_seconds), MOST_PROBE_SECONDS)


async def probe(rpc: Rpc, peer: str, key: Key, timeout_seconds: float, *, closing: bool = False) -> ProbeReply:
    """Tell a peer that this one is in a round, and whether it closes; return that peer's position.

    Raises:
        PeerError: The peer is unreachable, refuses, or its reply is malformed.
        DeadlineError: No reply in time.
    """
    return await rpc.call(peer, PROBE, Probe(key, closing), ProbeReply, timeout_seconds)


@dataclass
class _Seen:
    """Observations about one group.

    Attributes:
        probers: Peers that are in this round by their own account, even if no record says so yet.
        unreachable: Leaders that this peer could not reach.
    """

    failures: Counter[str] = field(default_factory=Counter)
    detours: Counter[str] = field(default_factory=Counter)
    unreachable: set[str] = field(default_factory=set)
    probers: set[str] = field(default_factory=set)


class Leaders:
    """Candidates for the leader of each round; remembers the latest group on each level of the tree."""

    def __init__(self, position: RoundPosition, membership: Membership) -> None:
        self.position = position
        self.membership = membership
        self._seen: dict[int, tuple[Key, _Seen]] = {}

    def _remember(self, key: Key) -> _Seen:
        """Return the observations about a group, and forget those about another group of its level."""
        if key.level not in self._seen or self._seen[key.level][0] != key:
            self._seen[key.level] = (key, _Seen())
        return self._seen[key.level][1]

    def _seen_of(self, key: Key) -> _Seen:
        known, seen = self._seen.get(key.level, (None, _Seen()))
        return seen if known == key else _Seen()

    def failed(self, key: Key, leader: str) -> None:
        self._count(self._remember(key).failures, leader)

    def redirect_loop(self, key: Key, leader: str) -> None:
        """Record that a leader redirected this peer to a later candidate, or in a loop."""
        self._count(self._remember(key).detours, leader)

    def _count(self, counter: Counter[str], leader: str) -> None:
        if leader in counter or len(counter) < MAX_FAILED:
            counter[leader] += 1

    def priority(self, key: Key, peer: str) -> tuple[int, bytes]:
        """Return the part of `order` on which peers mostly agree: failures of groups, and rank."""
        return (self._seen_of(key).failures[peer], rank(peer, key))

    def gossip(self, key: Key) -> Failures:
        """Return the leaders of this group with most failures, for newcomers."""
        return tuple(self._seen_of(key).failures.most_common(MAX_GOSSIP))

    def learn(self, key: Key, failures: Failures) -> None:
        """Adopt another peer's `gossip`, unless this peer has seen a failure in the round itself.

        Otherwise a newcomer would redirect the others to leaders that failed. A liar gains an attempt or two: own
        observations soon outweigh `MOST_BELIEVED` failures.
        """
        seen = self._remember(key)
        if not seen.failures:
            seen.failures.update({peer: min(number, MOST_BELIEVED) for peer, number in failures})

    def unanswered(self, key: Key, leader: str, error: Exception) -> None:
        """Suspect a leader that did not answer; if it was unreachable, it is the last candidate until `reached`."""
        self.lost(leader, str(error))
        if isinstance(error, PeerUnreachableError) and len(self._remember(key).unreachable) < MAX_FAILED:
            self._remember(key).unreachable.add(leader)

    def unreachable(self, key: Key) -> set[str]:
        """Return the leaders of this group that were not `reached` since a dial failed."""
        return self._seen_of(key).unreachable

    def reached(self, peer: str) -> None:
        """Record that a peer is connected: it may have restarted."""
        for _, seen in self._seen.values():
            seen.unreachable.discard(peer)

    def probed_by(self, key: Key, peer: str) -> None:
        """Record that a peer is in this round by its own account: it sent a probe, or was in the last round."""
        seen = self._remember(key)
        self.reached(peer)
        if len(seen.probers) < MAX_PROBERS:
            seen.probers.add(peer)

    def lost(self, peer: str, reason: str | None = None) -> None:
        """Record that a peer does not answer, as a suspect if there is a ``reason``."""
        if reason is not None:
            self.membership.suspect(peer, reason)
        for _, seen in self._seen.values():  # The membership only knows peers with a record.
            seen.probers.discard(peer)

    def probers(self, key: Key) -> set[str]:
        return self._seen_of(key).probers

    def order(self, key: Key, peer: str) -> tuple[int, bytes]:
        """Return a peer's sort key among the candidates; the smallest leads."""
        seen = self._seen_of(key)
        return (seen.failures[peer] + seen.detours[peer] + (peer in seen.unreachable), rank(peer, key))

    def candidates(self, key: Key, excluded: Collection[str]) -> list[str]:
        """Return the peers of the cell that may lead, in order; at least this peer.

        Absentees are included: peers that excluded each other would otherwise fork into lone lineages for ever.
        """
        membership, own = self.membership, self.position.peer
        others = {*membership.alive_trainers(), *self.probers(key)}.difference(excluded)
        there = {own, *(peer for peer in others if not membership.is_convicted(peer))}
        there = {peer for peer in there if self.position.cells.includes(key, peer)} or {own}
        return sorted(there, key=lambda peer: self.order(key, peer))

    def first(self, key: Key) -> str:
        """Return the peer to report to: the first candidate that is not unreachable."""
        return self.candidates(key, self.unreachable(key))[0]
