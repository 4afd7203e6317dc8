"""The round in progress as this peer sees it: its head, and the peers that may lead its group.

Peers lead in the order of the member table (`Table.order`), which changes with each round and puts those last that
missed their turn in earlier rounds. A leader that failed goes to the end: its followers saw the group break, and all
skip it in the next attempt. A peer that was not in the group is redirected by the leader that took over.

Views of failures differ, so two peers may each follow the other, or both claim to lead. Between two peers that sent
each other tickets, the table's order decides (`p2ptrain.averaging.grouping.coordinator.Coordinator.follow`). Between
two that both have followers, failures of groups come first (`Leaders.priority`); peers mostly agree on those.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.cells import Cells, Key
from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.grouping.messages import MAX_GOSSIP, PROBE, Failures, Probe, ProbeReply
from p2ptrain.averaging.protocol.certificate import Certificate, Head
from p2ptrain.averaging.protocol.table import NO_MEMBERS, Table
from p2ptrain.errors import PeerUnreachableError
from p2ptrain.manifest import AveragingSpec

LEAST_PROBE_SECONDS, MOST_PROBE_SECONDS = 3.0, 10.0
DIALS = 4.0  # a question takes two dials, because it opens a stream, then asks; twice as many for retransmissions
LEAST_TURN_SECONDS = 2.0
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
        attempts: Attempts at the round in progress that this peer, or a delegate that it waited for, was in.
        standstill: Seconds for which this peer, while it was awake, has tried to end the round in progress.
        turn: The group in which this peer was sent on too often, and whose turn it is to lead it.
        leaves: True if this peer leaves the swarm after the round in progress.
        left: Peers that signed reduced rounds of their own after this peer's full head, by their certificates.
        on_close: Called each time another peer says that the round in progress closes.
    """

    head: Head
    peer: str
    cells: Cells
    participates: bool = field(default=False, init=False)
    following: tuple[Key, str] | None = field(default=None, init=False)
    closing: Key | None = field(default=None, init=False)
    running: tuple[Key, str, tuple[str, ...]] | None = field(default=None, init=False)
    attempts: int = field(default=0, init=False)
    standstill: float = field(default=0.0, init=False)
    turn: tuple[Key, str] | None = field(default=None, init=False)
    leaves: bool = field(default=False, init=False)
    left: frozenset[str] = field(default=frozenset(), init=False)
    on_close: Callable[[], None] = lambda: None

    @property
    def key(self) -> Key:
        """This peer's group on level 0 in the round in progress."""
        return self.cells.key_of(self.head, self.peer)

    @property
    def is_closing(self) -> bool:
        """True if this peer should hand in its work for the round in progress."""
        return self.closing == self.key

    def in_turn(self, key: Key) -> str:
        """Return whose turn it is to lead a group; empty while this peer goes by the order of `Leaders`."""
        return self.turn[1] if self.turn is not None and self.turn[0] == key else ""

    def is_of(self, key: Key) -> bool:
        """True if a group belongs to the round in progress."""
        return key[:3] == (self.head.round, self.head.lineage, self.head.present)

    def table_of(self, key: Key) -> Table:
        """Return the member table of a group's round; empty for another round than that in progress."""
        return self.head.table if self.is_of(key) else NO_MEMBERS

    def order(self, key: Key, peer: str) -> tuple[int, bytes]:
        """Return a peer's sort key among the leaders of a group, alike for all holders of the head."""
        return self.table_of(key).order(peer, key.lineage, key.level, key.cell)

    def is_stalled(self, spec: AveragingSpec) -> bool:
        """True if no full round was possible for so long that this peer agrees to a reduced one."""
        return self.standstill >= spec.matchmaking_seconds

    def follows(self, head: Head, spec: AveragingSpec) -> bool:
        """True if this peer should go on from another head.

        It leaves a full head of its own for a reduced lineage only after its own wait: a few members may have closed a
        round without the others, which are still there. It does not wait if so many `left` that none of the others can
        end a full round, and this peer was in no attempt at one.
        """
        if head.lineage == self.head.lineage or not head.outranks(self.head):
            return False
        if head.full > self.head.full or self.head.is_reduced or not head.is_reduced or self.is_stalled(spec):
            return True
        return not self.attempts and self.head.table.is_stopped_without(self.left)

    def note_left(self, chain: Iterable[Certificate]) -> None:
        """Record who `left`, by valid certificates that follow this peer's head.

        Records do not count, and rosters alone neither: a liar could list peers that are not there. More than a third
        of the voters cannot all lie, and each honest one waited before it signed.
        """
        lineage = self.head.lineage
        for certificate in chain:
            if certificate.body.lineage != lineage or not certificate.body.is_reduced:
                return
            self.left |= certificate.signing_members
            lineage = certificate.body.next_lineage

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


def probe_seconds(context: PeerContext, peer: str = "") -> float:
    """Return the timeout of a question to a peer: a grace period, or longer for a peer whose dials take long."""
    seconds = DIALS * context.rpc.dial_seconds.get(peer, 0.0)
    return min(max(LEAST_PROBE_SECONDS, context.spec.grace_seconds, seconds), MOST_PROBE_SECONDS)


async def probe(
    context: PeerContext, peer: str, key: Key, *, closing: bool = False, seconds: float | None = None
) -> ProbeReply:
    """Tell a peer that this one is in a round, and whether it closes; return that peer's position.

    ``seconds`` is `probe_seconds` by default.

    Raises:
        PeerError: The peer is unreachable, refuses, or its reply is malformed.
        DeadlineError: No reply in time.
    """
    seconds = probe_seconds(context, peer) if seconds is None else seconds
    return await context.rpc.call(peer, PROBE, Probe(key, closing), ProbeReply, seconds)


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

    def priority(self, key: Key, peer: str) -> tuple[int, int, bytes]:
        """Return the part of `order` on which peers mostly agree: failures of groups, and the table's order."""
        return self._seen_of(key).failures[peer], *self.position.order(key, peer)

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

    def order(self, key: Key, peer: str) -> tuple[int, int, bytes]:
        """Return a peer's sort key among the candidates; the smallest leads."""
        seen = self._seen_of(key)
        failed = seen.failures[peer] + seen.detours[peer] + (peer in seen.unreachable)
        return failed, *self.position.order(key, peer)

    def may_lead(self, key: Key, peer: str) -> bool:
        """True if a peer is among the members that lead rounds of this lineage, or if this peer knows of none."""
        leading = self._leading(key)
        return peer in leading if leading else True

    def _leading(self, key: Key) -> frozenset[str]:
        """Return the members that may lead a group; empty before the founding round, and in another round."""
        position = self.position
        if not position.is_of(key):
            return frozenset()
        return frozenset(peer for peer in position.head.table.leading if position.cells.includes(key, peer))

    def candidates(self, key: Key, excluded: Collection[str]) -> list[str]:
        """Return the peers of the cell that may lead, in order; at least this peer.

        The lineage's member table names them. Before the founding round, peers know each other by their records alone.
        So do newcomers whose members are all gone: each alone would end the round in a lineage of its own.
        """
        own, members = self.position.peer, self._leading(key)
        are_gone = not (own in members or self._able(key, members, ()))
        if not members or (are_gone and not self.position.table_of(key).is_open):
            members = frozenset({own, *self.membership.alive_trainers(), *self.probers(key)})
        able = self._able(key, members, excluded)
        return sorted(able | (members & {own}) or {own}, key=lambda peer: self.order(key, peer))

    def _able(self, key: Key, peers: frozenset[str], excluded: Collection[str]) -> frozenset[str]:
        """Return the other peers among these that may answer."""
        membership, there = self.membership, {peer for peer in peers if self.position.cells.includes(key, peer)}
        absent = {peer for peer in there if membership.is_suspect(peer) or membership.is_resting(peer)}
        able = (there & self.probers(key) | there - absent).difference(excluded, {self.position.peer})
        return frozenset(peer for peer in able if not membership.is_convicted(peer))

    def in_turn(self, key: Key, now: float, spec: AveragingSpec) -> tuple[str, float]:
        """Return whose turn it is to lead, and the seconds that are left of it; alike for all whose clocks agree.

        Observations do not count here: peers that made other ones would send each other on for ever. So a dead member
        has its turn, too.
        """
        there = sorted(self._leading(key) or self.candidates(key, ()), key=lambda peer: self.position.order(key, peer))
        seconds = LEAST_TURN_SECONDS + 2.0 * spec.grace_seconds
        number, passed = divmod(now, seconds)
        return there[int(number) % len(there)], seconds - passed

    def first(self, key: Key) -> str:
        """Return the peer to report to: the first candidate that is not unreachable."""
        return self.candidates(key, self.unreachable(key))[0]
