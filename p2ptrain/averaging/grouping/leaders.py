"""The round in progress as this peer sees it: its head, and the peers that may lead its group.

Members lead in turn, in the order of the member table (`Table.order`). It is alike for all holders of a head, changes
with each round, and puts those last that missed their turn in earlier rounds. Each member counts turns by itself: the
next one begins once a leader fails, or once more than a third of the members are in a later one, as in viewstamped
replication. A ticket for a turn that is over is sent back, and one for a later turn goes to the leader that its sender
alone passed over, or is held until its turn comes. So members that see different peers fail meet in one turn, and
nobody follows what a single peer says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.cells import Cells, Key
from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.grouping.messages import PROBE, Probe, ProbeReply
from p2ptrain.averaging.protocol.certificate import Certificate, Head
from p2ptrain.averaging.protocol.table import NO_MEMBERS, Table

LEAST_PROBE_SECONDS, MOST_PROBE_SECONDS = 3.0, 10.0
DIALS = 4.0  # a question takes two dials, because it opens a stream, then asks; twice as many for retransmissions
MAX_PROBERS = 64
MAX_COUNTED = 1024


@dataclass
class RoundPosition:
    """The position of this peer among the rounds, shared by both sides of matchmaking.

    Attributes:
        peer: This peer's id.
        patience_seconds: Seconds without a full round after which this peer agrees to a reduced one.
        participates: True if this peer trains; then it also waits for itself as a leader.
        following: The group and the leader to which it sent a ticket.
        closing: The group that should form with the work that this peer has.
        attempts: Attempts at the round in progress that this peer, or a delegate that it waited for, was in.
        standstill: Seconds for which this peer, while it was awake, has tried to end the round in progress.
        leaves: True if this peer leaves the swarm after the round in progress.
        left: Peers that signed reduced rounds of their own after this peer's full head, by their certificates.
        on_close: Called each time another peer says that the round in progress closes.
    """

    head: Head
    peer: str
    cells: Cells
    patience_seconds: float = math.inf
    participates: bool = field(default=False, init=False)
    following: tuple[Key, str] | None = field(default=None, init=False)
    closing: Key | None = field(default=None, init=False)
    attempts: int = field(default=0, init=False)
    standstill: float = field(default=0.0, init=False)
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

    def is_of(self, key: Key) -> bool:
        """True if a group belongs to the round in progress."""
        return key[:3] == (self.head.round, self.head.lineage, self.head.present)

    def table_of(self, key: Key) -> Table:
        """Return the member table of a group's round; empty for another round than that in progress."""
        return self.head.table if self.is_of(key) else NO_MEMBERS

    def order(self, key: Key, peer: str) -> tuple[int, bytes]:
        """Return a peer's sort key among the leaders of a group, alike for all holders of the head."""
        return self.table_of(key).order(peer, key.lineage, key.level, key.cell)

    @property
    def is_stalled(self) -> bool:
        """True if no full round was possible for so long that this peer agrees to a reduced one."""
        return self.standstill >= self.patience_seconds

    def follows(self, head: Head) -> bool:
        """True if this peer should go on from another head.

        It leaves a full head of its own for a reduced lineage only after its own wait: a few members may have closed a
        round without the others, which are still there. It does not wait if so many `left` that none of the others can
        end a full round, and this peer was in no attempt at one.
        """
        if head.lineage == self.head.lineage or not head.outranks(self.head):
            return False
        if head.full > self.head.full or self.head.is_reduced or not head.is_reduced or self.is_stalled:
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
        passed: How often this peer passed over each leader; all together are its turn.
        turns: The turns of members, by their own account.
        probers: Peers that are in this round by their own account, even if no record says so yet.
    """

    passed: Counter[str] = field(default_factory=Counter)
    turns: dict[str, int] = field(default_factory=dict)
    probers: set[str] = field(default_factory=set)


class Leaders:
    """Candidates for the leader of each round; remembers the latest group on each level of the tree.

    ``on_turn`` is called when a turn begins because of others.
    """

    def __init__(
        self, position: RoundPosition, membership: Membership, on_turn: Callable[[Key], None] = lambda key: None
    ) -> None:
        self.position = position
        self.membership = membership
        self._on_turn = on_turn
        self._seen: dict[int, tuple[Key, _Seen]] = {}
        self._led: dict[int, tuple[Key, frozenset[str], frozenset[str]]] = {}

    def _remember(self, key: Key) -> _Seen:
        """Return the observations about a group, and forget those about another group of its level."""
        if key.level not in self._seen or self._seen[key.level][0] != key:
            self._seen[key.level] = (key, _Seen())
        return self._seen[key.level][1]

    def _seen_of(self, key: Key) -> _Seen:
        known, seen = self._seen.get(key.level, (None, _Seen()))
        return seen if known == key else _Seen()

    # --- turns ----------------------------------------------------------------------------------------------------

    def turn(self, key: Key) -> int:
        """Return how many leaders of a group this peer has passed over."""
        return self._seen_of(key).passed.total()

    def has_passed(self, key: Key, leader: str) -> bool:
        """True if this peer has passed over a leader."""
        return self._seen_of(key).passed[leader] > 0

    def stand(self, key: Key, leader: str) -> None:
        """Begin the turn of ``leader``: those before it are passed over, although they may answer again soon."""
        order = sorted(self._there(key) | {leader}, key=lambda peer: self.order(key, peer))
        for peer in order[: order.index(leader)]:
            self._pass_over(key, peer)

    def failed(self, key: Key, leader: str) -> None:
        """Begin the next turn, unless that of ``leader`` is over, or nobody else leads."""
        if len(self._there(key)) > 1 and self.order(key, leader) <= self.order(key, self.first(key)):
            self.stand(key, leader)
            self._pass_over(key, leader)

    def _pass_over(self, key: Key, leader: str) -> None:
        passed = self._remember(key).passed
        if leader in passed or len(passed) < MAX_COUNTED:
            passed[leader] += 1

    def heard(self, key: Key, peer: str, turn: int) -> None:
        """Record a member's turn; once more than a third of the members are in a later one, this peer is, too.

        Without them no earlier leader gets a quorum. Some of them are honest: they could not reach the leaders before,
        for which the round does not wait any more. A ticket of another cell says nothing about this peer's group.
        """
        leading = self._leading(key)
        if peer not in leading or peer == self.position.peer or len(leading) == 1:
            return
        if not self.position.cells.includes(key, self.position.peer):
            return
        turns = self._remember(key).turns
        turns[peer] = turn
        rest = sorted((turns.get(each, 0) for each in leading - {self.position.peer}), reverse=True)
        most = rest[min(len(leading) // 3, len(rest) - 1)]
        turns_left = min(most - self.turn(key), len(leading))
        for _ in range(turns_left):
            first = min(leading, key=lambda each: self.order(key, each))
            self.lost(first)
            self.membership.missed_round(first)
            self._pass_over(key, first)
        if turns_left > 0:
            self._on_turn(key)

    # --- who is there ---------------------------------------------------------------------------------------------

    def probed_by(self, key: Key, peer: str) -> None:
        """Record that a peer is in this round by its own account: it sent a probe, or was in the last round."""
        probers = self._remember(key).probers
        if len(probers) < MAX_PROBERS:
            probers.add(peer)

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
        return self._seen_of(key).passed[peer], *self.position.order(key, peer)

    def may_lead(self, key: Key, peer: str) -> bool:
        """True if a peer is among the members that lead rounds of this lineage, or if this peer knows of none."""
        leading = self._leading(key)
        return peer in leading if leading else True

    def _leading(self, key: Key) -> frozenset[str]:
        """Return the members that may lead a group; empty before the founding round, and in another round.

        Once this peer agrees to a reduced round, those that sleep may, too: those that are awake could be gone.
        """
        position, known = self.position, self._led.get(key.level)
        if not position.is_of(key):
            return frozenset()
        table = position.head.table
        leading = table.standing_in if position.is_stalled else table.leading
        if known is None or known[0] != key or known[1] is not leading:  # Each ticket asks, and a table may be long.
            there = frozenset(peer for peer in leading if position.cells.includes(key, peer))
            known = self._led[key.level] = key, leading, there
        return known[2]

    def is_agreed(self, key: Key) -> bool:
        """True if the leaders of a group follow from the member table.

        Before the founding round, peers know each other by their records alone. So do newcomers whose members are all
        gone: each alone would end the round in a lineage of its own.
        """
        members = self._leading(key)
        is_one_there = self.position.peer in members or bool(self._able(key, members, ()))
        return bool(members) and (is_one_there or self.position.table_of(key).is_open)

    def _there(self, key: Key) -> frozenset[str]:
        """Return the peers of the cell that lead in turn, by the member table or as far as this peer knows them."""
        if self.is_agreed(key):
            return self._leading(key)
        own, known = self.position.peer, {*self.membership.alive_trainers(), *self.probers(key)}
        return frozenset({own, *(peer for peer in known if self.position.cells.includes(key, peer))})

    def candidates(self, key: Key, excluded: Collection[str]) -> list[str]:
        """Return the peers of the cell that may lead and may answer, the one whose turn it is first; at least this one.

        It is this peer alone if no member that may lead answers.
        """
        own, there = self.position.peer, self._there(key)
        able = self._able(key, there, excluded)
        return sorted(able | (there & {own}) or {own}, key=lambda peer: self.order(key, peer))

    def first(self, key: Key) -> str:
        """Return the leader whose turn it is."""
        return self.candidates(key, ())[0]

    def _able(self, key: Key, peers: frozenset[str], excluded: Collection[str]) -> frozenset[str]:
        """Return the other peers among these that may answer."""
        membership = self.membership
        absent = {peer for peer in peers if membership.is_suspect(peer) or membership.is_resting(peer)}
        able = (peers & self.probers(key) | peers - absent).difference(excluded, {self.position.peer})
        return frozenset(peer for peer in able if not membership.is_convicted(peer))
