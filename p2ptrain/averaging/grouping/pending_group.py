"""A group that its leader forms: it collects tickets until the round closes.

`decide` is the whole policy, a pure function of a `Situation`; `PendingGroup` holds the tickets and reports behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from p2ptrain.averaging.grouping.cells import Cells, Key
from p2ptrain.averaging.grouping.membership import rank
from p2ptrain.averaging.grouping.messages import Answer, Formed, Later, Refused
from p2ptrain.averaging.protocol.certificate import Head, Ticket
from p2ptrain.averaging.protocol.table import NO_MEMBERS, Table, quorum_of
from p2ptrain.averaging.timing.goal import BatchProgress, GlobalBatch, LocalSteps, StepProgress
from p2ptrain.manifest import AveragingSpec


def group_spec(spec: AveragingSpec, cells: Cells, key: Key) -> AveragingSpec:
    """Return the rules of one group.

    ``min_peers`` is about the whole swarm, not a cell. Delegates wait for the grace periods of the levels below.
    """
    if cells.num_levels(key.present) == 1:
        return spec
    return spec.model_copy(update={"min_peers": 1, "grace_seconds": spec.grace_seconds * (1 + key.level)})


def may_reduce(table: Table, tickets: Collection[Ticket]) -> bool:
    """True if these peers may close a round without the voters of a full one.

    They waited for them, or follow others that did: two thirds of the members that are awake in a reduced lineage.
    """
    here = {ticket.peer for ticket in tickets}
    if len(table.electorate & here) < table.least_of_electorate:
        return False
    goes_on = table.is_reduced and len(table.awake & here) >= quorum_of(len(table.awake))
    return goes_on or all(ticket.stalled for ticket in tickets)


@dataclass(frozen=True)
class Situation:
    """A leader's knowledge about one round.

    Attributes:
        ready: Number of peers that sent a ticket.
        missing: Number of expected members without one.
        guests: Number of expected peers without one that are no members yet; they count for no quorum.
        is_reduced: True if the round would be reduced; None if too few voters are there for either kind.
        batch_is_full: True if the peers reached the round's goal together.
        seconds_waiting: Time since the first ticket; 0 without tickets.
        seconds_since_quorum: None before the quorum.
        of_delegates: True above level 0. Two halves would fork the lineage, so half is no quorum before the deadline.
    """

    ready: int
    missing: int
    batch_is_full: bool
    seconds_waiting: float
    seconds_since_quorum: float | None
    of_delegates: bool = False
    guests: int = 0
    is_reduced: bool | None = False


@dataclass(frozen=True)
class Decision:
    """A leader's next action, and the reason for its log."""

    action: Literal["wait", "close", "form", "give up"]
    reason: str


def has_quorum(situation: Situation, spec: AveragingSpec) -> bool:
    """True if enough of the expected peers are ready to close the round without the rest."""
    in_time = situation.seconds_waiting < spec.matchmaking_seconds
    if situation.of_delegates and in_time and situation.ready <= situation.missing:
        return False
    return situation.ready > 0 and situation.ready >= spec.quorum * (situation.ready + situation.missing)


def decide(situation: Situation, spec: AveragingSpec) -> Decision:
    """Return the next action: wait, ask the rest to hand in (``close``), form the group as it is, or give up."""
    total = situation.ready + situation.missing
    # At the end of the wait for voters all send newer tickets, which agree to do without, and do not arrive together.
    patience = spec.matchmaking_seconds + (0.0 if situation.is_reduced is False else spec.grace_seconds)
    out_of_time = situation.seconds_waiting >= patience
    if not situation.ready:
        return Decision("close" if situation.batch_is_full else "wait", "no peer is ready yet")
    if situation.ready < spec.min_peers:
        if out_of_time:
            return Decision("give up", f"{situation.ready} of at least {spec.min_peers} peers are ready")
        hurry = situation.missing > 0 and (situation.batch_is_full or has_quorum(situation, spec))
        reason = f"waiting for {spec.min_peers - situation.ready} more peers: the minimum is unmet"
        return Decision("close" if hurry else "wait", reason)
    if situation.is_reduced is None or not has_quorum(situation, spec):
        lacking = "no quorum" if situation.is_reduced is not None else "too few voters, is the seed up?"
        if out_of_time:
            return Decision("give up", f"{situation.ready} of {total} peers are ready: {lacking}")
        closes = situation.batch_is_full or has_quorum(situation, spec)
        return Decision("close" if closes else "wait", f"{situation.ready} of {total} peers are ready: {lacking}")
    if not situation.missing and not situation.guests:
        return Decision("form", f"all {total} peers are ready")
    if out_of_time or (situation.seconds_since_quorum or 0.0) >= spec.grace_seconds:
        return Decision("form", f"{situation.ready} of {total} peers are ready and the grace period is over")
    return Decision("close", f"{situation.ready} of {total} peers are ready: a quorum")


def without_conflicts(avoid: Mapping[str, frozenset[str]], least: int = 1, others: Collection[str] = ()) -> list[str]:
    """Return peers that can share a group, in the given order.

    The peer in most conflicts is excluded first: a peer that complains about all others excludes itself. Of equals, the
    last in order is excluded; the order differs in each round.

    Args:
        avoid: By peer: the peers with which rounds broke for it.
        least: Minimum number of peers to keep.
        others: Peers that are excluded before all that are not among them: a crowd of newcomers keeps no member out.
    """
    kept = list(avoid)
    while len(kept) > least:
        conflicts = {
            peer: sum(other in avoid[peer] or peer in avoid[other] for other in kept if other != peer) for peer in kept
        }
        worst = max(reversed(kept), key=lambda peer: (conflicts[peer] > 0 and peer in others, conflicts[peer]))
        if not conflicts[worst]:
            break
        kept.remove(worst)
    return kept


@dataclass
class _Member:
    ticket: Ticket
    answer: asyncio.Future[Answer]
    avoid: frozenset[str]
    turn: int


@dataclass
class PendingGroup:
    """Tickets and reports for one group of one round, at its leader.

    Attributes:
        head: The head before the round, as the first member sent it.
        slot_of: Returns the unit that a peer represents; see `p2ptrain.averaging.grouping.cells.Cells.slot`.
        members: By slot: tickets, in order of arrival.
        passed: Peers without work for this round; the group does not wait for them.
        closing: True once the other peers were asked to hand in.
        over: True once members got their answers; later arrivals open a new group.
        changed: Set by every change; the leader's loop clears it.
        last_activity: Time of the last ticket or report.
    """

    head: Head
    key: Key
    spec: AveragingSpec
    batch: GlobalBatch
    slot_of: Callable[[str], str] = lambda peer: peer
    steps: LocalSteps = field(default_factory=LocalSteps)
    members: dict[str, _Member] = field(default_factory=dict, init=False)
    passed: set[str] = field(default_factory=set, init=False)
    closing: bool = field(default=False, init=False)
    over: bool = field(default=False, init=False)
    changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    last_activity: float = field(default=0.0, init=False)
    _stirred: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _first_ticket_at: float | None = field(default=None, init=False)
    _quorum_at: float | None = field(default=None, init=False)

    def add(
        self, ticket: Ticket, now: float, avoid: frozenset[str] = frozenset(), turn: int = 0
    ) -> asyncio.Future[Answer]:
        """Add a ticket, which replaces the peer's older one; the future resolves with the final answer.

        Two peers cannot represent one cell: the second is refused. ``turn`` is the sender's (`Join`).
        """
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        slot = self.slot_of(ticket.peer)
        previous = self.members.get(slot)
        if previous is not None and previous.ticket.peer != ticket.peer:
            answer.set_result(Refused("another peer speaks for your cell"))
            return answer
        if previous is not None and not previous.answer.done():
            previous.answer.set_result(Refused("a newer ticket replaced this one"))
        self.members.pop(slot, None)
        self.members[slot] = _Member(ticket, answer, avoid, turn)
        self.passed.discard(ticket.peer)
        self.batch.hand_in(ticket.peer, ticket.samples)
        self.steps.hand_in(ticket.peer, now)
        self._first_ticket_at = now if self._first_ticket_at is None else self._first_ticket_at
        self.last_activity = now
        self.stir()
        return answer

    def remove(self, peer: str, answer: asyncio.Future[Answer]) -> None:
        """Remove a member that left, unless it has sent a new ticket."""
        member = self.members.get(self.slot_of(peer))
        if member is not None and member.answer is answer:
            del self.members[self.slot_of(peer)]
            self.stir()

    def holder(self, peer: str) -> str:
        """Return the other peer that represents this one's slot; empty if there is none."""
        member = self.members.get(self.slot_of(peer))
        return "" if member is None or member.ticket.peer == peer or self.over else member.ticket.peer

    def dismiss(self, peer: str, reason: str) -> None:
        member = self.members.get(self.slot_of(peer))
        if member is not None and member.ticket.peer == peer and not member.answer.done():
            member.answer.set_result(Refused(reason))
            self.remove(peer, member.answer)

    def dismiss_until(self, turn: int) -> None:
        """Send the tickets of this turn and of earlier ones back."""
        for member in self.members.values():
            if member.turn <= turn and not member.answer.done():
                member.answer.set_result(Later())

    def has(self, peer: str) -> bool:
        member = self.members.get(self.slot_of(peer))
        return member is not None and member.ticket.peer == peer

    def report(self, peer: str, report: BatchProgress) -> None:
        self.batch.report(peer, report)
        self.last_activity = report.reported_at
        self.stir()

    def report_steps(self, peer: str, report: StepProgress) -> None:
        self.steps.report(peer, report)
        self.last_activity = report.heard_at
        self.stir()

    def stir(self) -> None:
        """Wake all tasks that wait for a change."""
        self.changed.set()
        self._stirred.set()
        self._stirred = asyncio.Event()

    async def wait_for_change(self, timeout_seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._stirred.wait()

    def situation(
        self, expected: list[str], now: float, guests: Collection[str] = (), *, is_reduced: bool | None = False
    ) -> Situation:
        """Drop members that left, and return the input of `decide` for these expected slots and guests."""
        self.members = {slot: member for slot, member in self.members.items() if not member.answer.done()}
        missing = [slot for slot in expected if slot not in self.members]
        is_full = self.batch.is_full or self.steps.is_due(now)
        situation = Situation(
            len(self.members), len(missing), is_full, self.seconds_waiting(now), None, self.key.level > 0,
            len(set(guests) - self.members.keys()), is_reduced,
        )  # fmt: skip
        if is_reduced is None or not has_quorum(situation, self.spec):
            self._quorum_at = None
            return situation
        self._quorum_at = now if self._quorum_at is None else self._quorum_at
        return replace(situation, seconds_since_quorum=now - self._quorum_at)

    def seconds_waiting(self, now: float) -> float:
        """Return the time since the first ticket; 0 without tickets."""
        return 0.0 if self._first_ticket_at is None else now - self._first_ticket_at

    def next_change(self, now: float) -> float:
        """Return the seconds until `decide` may change its mind without a message; bounded."""
        times, grace = [now + 2.0], self.spec.grace_seconds
        if self.steps.at is not None and not self.closing:
            times.append(self.steps.at)
        if self._first_ticket_at is not None:
            out_of_time = self._first_ticket_at + self.spec.matchmaking_seconds
            times += [out_of_time, out_of_time + grace]
        if self._quorum_at is not None:
            times.append(self._quorum_at + grace)
        return min(time for time in times if time > now) - now + 0.001

    def answer_all(self, answer: Answer) -> None:
        """Give all members the same answer, and end this group."""
        self.over = True
        for member in self.members.values():
            if not member.answer.done():
                member.answer.set_result(answer)
        self.stir()

    @property
    def tickets(self) -> list[Ticket]:
        return [member.ticket for member in self.members.values() if not member.answer.done()]

    def form(
        self, is_reduced: Callable[[Sequence[Ticket]], bool | None] = lambda tickets: False, table: Table = NO_MEMBERS
    ) -> list[str]:
        """Form the group, answer all members, and return the peers in it.

        It refuses members whose state is not the most common one, members in conflict with others, and members beyond
        the group size or `Table.most_guests`. Only the peers that may lead count here, if some are there: all others
        may be one peer. Refused members keep their work for the next round. ``is_reduced`` tells whether the round of
        the rest would be reduced; None refuses them all.
        """
        table = NO_MEMBERS if self.key.level else table
        leading = [member for member in self.members.values() if member.ticket.peer in table.leading]
        digests = Counter((m.ticket.digest, m.ticket.layout) for m in leading or self.members.values())
        common = max(digests, key=lambda key: (digests[key], key), default=(b"", b""))
        chosen: dict[str, _Member] = {}
        for member in sorted(self.members.values(), key=lambda member: rank(member.ticket.peer, self.key)):
            if member.answer.done():
                continue
            if (member.ticket.digest, member.ticket.layout) != common:
                same_layout = member.ticket.layout == common[1]
                what = "state" if same_layout else "model layout or codec"
                member.answer.set_result(Refused(f"your {what} differs from the group's", mismatch=same_layout))
            else:
                chosen[member.ticket.peer] = member
        avoid = {peer: member.avoid for peer, member in chosen.items()}
        kept = without_conflicts(avoid, self.spec.min_peers, chosen.keys() - table.leading)
        members = sorted(table.group_of(kept, self.spec.group_size, self.spec.min_peers))
        for peer in [peer for peer in chosen if peer not in members]:
            why = "the group is full" if peer in kept else "rounds with you and another member broke again and again"
            chosen[peer].answer.set_result(Refused(f"{why}: your work waits a round"))
        tickets = tuple(chosen[peer].ticket for peer in members)
        reduced = is_reduced(tickets)
        if reduced is None:
            self.answer_all(Refused("too few voters for a certificate are left in the group"))
        else:
            self.answer_all(Formed(tickets, reduced))
        return members
