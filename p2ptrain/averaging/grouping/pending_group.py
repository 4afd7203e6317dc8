"""A group that its leader is forming: it collects tickets until the round should close.

For each round the peer of the smallest `rank` leads. Leading is independent of training, costs a few small messages,
and moves on every round; when a leader fails, its followers go to the next in rank. `decide` is the whole policy, a
pure function; the rest of this file is the shell that feeds it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from p2ptrain.averaging.grouping.cells import Cells, Key
from p2ptrain.averaging.grouping.membership import rank
from p2ptrain.averaging.grouping.messages import Answer, Formed, Refused
from p2ptrain.averaging.protocol.certificate import Head, Roster, Ticket
from p2ptrain.averaging.timing.goal import MAX_REPORTS, Closing, GlobalBatch, Report, StepReport
from p2ptrain.manifest import AveragingSpec


def agrees_with_itself(roster: Roster, cells: Cells) -> bool:
    """Return True if the tickets of a roster belong together, and are in the order of the peers' ids."""
    first = roster.tickets[0]
    key = cells.key_of(first, first.peer, first.level)
    slots = {cells.slot(key, peer) for peer in roster.members}
    agreed = {(t.digest, t.layout, cells.key_of(t, t.peer, t.level)) for t in roster.tickets}
    ordered = list(roster.members) == sorted(set(roster.members))
    return agreed == {(first.digest, first.layout, key)} and ordered and len(slots) == len(roster.tickets)


@dataclass(frozen=True)
class Situation:
    """What a leader knows about one round.

    Attributes:
        ready: Peers that handed in a ticket.
        missing: Peers that are expected to, but did not yet.
        batch_is_full: Whether the peers have reached the round's goal together.
        seconds_waiting: Since the first ticket; 0 without tickets.
        seconds_since_quorum: Since the quorum was ready; None before.
        of_delegates: Whether the peers are delegates. Two halves of them would end the round in two lineages, so half
            of them are no quorum until the time is up.
    """

    ready: int
    missing: int
    batch_is_full: bool
    seconds_waiting: float
    seconds_since_quorum: float | None
    of_delegates: bool = False


@dataclass(frozen=True)
class Decision:
    """What to do, and why, in words that a log or a status page can show."""

    action: Literal["wait", "close", "form", "give up"]
    reason: str


def has_quorum(situation: Situation, spec: AveragingSpec) -> bool:
    """Return True if enough of the expected peers are ready for the round to close without the rest."""
    in_time = situation.seconds_waiting < spec.matchmaking_seconds
    if situation.of_delegates and in_time and situation.ready <= situation.missing:
        return False
    return situation.ready > 0 and situation.ready >= spec.quorum * (situation.ready + situation.missing)


def decide(situation: Situation, spec: AveragingSpec) -> Decision:
    """Decide to wait, to hurry the rest (``close``), to form the group of the peers that are ready, or to give up."""
    total = situation.ready + situation.missing
    out_of_time = situation.seconds_waiting >= spec.matchmaking_seconds
    if not situation.ready:
        return Decision("close" if situation.batch_is_full else "wait", "no peer is ready yet")
    if situation.ready < spec.min_peers:
        if out_of_time:
            return Decision("give up", f"{situation.ready} of at least {spec.min_peers} peers are ready")
        hurry = situation.missing > 0 and (situation.batch_is_full or has_quorum(situation, spec))
        reason = f"waiting for {spec.min_peers - situation.ready} more peers: the minimum is unmet"
        return Decision("close" if hurry else "wait", reason)
    if not situation.missing:
        return Decision("form", f"all {total} peers are ready")
    if not has_quorum(situation, spec):
        if out_of_time:
            return Decision("give up", f"{situation.ready} of {total} peers are ready: no quorum")
        return Decision("close" if situation.batch_is_full else "wait", f"{situation.ready} of {total} peers are ready")
    if out_of_time or (situation.seconds_since_quorum or 0.0) >= spec.grace_seconds:
        return Decision("form", f"{situation.ready} of {total} peers are ready and the grace period is over")
    return Decision("close", f"{situation.ready} of {total} peers are ready: a quorum")


def without_conflicts(avoid: Mapping[str, frozenset[str]], least: int = 1) -> list[str]:
    """Return the peers that can be in one group, in the order given, where pairs of them cannot work together.

    The peer in most such pairs is left out first, so that one that complains about everybody leaves out itself; among
    equals the last in order, which changes from round to round.

    Args:
        avoid: By peer: the peers with which rounds broke for it.
        least: So many are kept in any case.
    """
    kept = list(avoid)
    while len(kept) > least:
        conflicts = {
            peer: sum(other in avoid[peer] or peer in avoid[other] for other in kept if other != peer) for peer in kept
        }
        worst = max(reversed(kept), key=lambda peer: conflicts[peer])
        if not conflicts[worst]:
            break
        kept.remove(worst)
    return kept


@dataclass
class _Member:
    ticket: Ticket
    answer: asyncio.Future[Answer]
    avoid: frozenset[str]


@dataclass
class PendingGroup:
    """The tickets and reports for one group of one round, held by its leader.

    Attributes:
        head: The head whose round this closes, as its first member described it.
        key: Which group of that round.
        spec: Quorum, grace, deadlines.
        batch: The global batch, as far as it was reported or handed in.
        slot_of: For whom a peer speaks in this group; see `p2ptrain.averaging.grouping.cells.Cells.slot`.
        steps: When the round closes, going by the local steps that were reported.
        members: By slot: tickets handed in, in order of arrival.
        passed: Peers that have nothing for this round. Nobody waits for them.
        closing: Whether the rest was told to come with what they have.
        over: Whether members got their answers; later arrivals open a new group.
        changed: Set by every change; the leader's loop clears it.
        last_activity: When a ticket or report came last.
        asking_since: When absent peers were first asked before the group is formed; None before.
    """

    head: Head
    key: Key
    spec: AveragingSpec
    batch: GlobalBatch
    slot_of: Callable[[str], str] = lambda peer: peer
    steps: Closing = field(default_factory=Closing)
    members: dict[str, _Member] = field(default_factory=dict, init=False)
    passed: set[str] = field(default_factory=set, init=False)
    closing: bool = field(default=False, init=False)
    over: bool = field(default=False, init=False)
    changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    last_activity: float = field(default=0.0, init=False)
    asking_since: float | None = field(default=None, init=False)
    _stirred: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _first_ticket_at: float | None = field(default=None, init=False)
    _quorum_at: float | None = field(default=None, init=False)

    def add(self, ticket: Ticket, now: float, avoid: frozenset[str] = frozenset()) -> asyncio.Future[Answer]:
        """Take a ticket; the future resolves with the final answer.

        A peer's newer ticket replaces its older. Two peers cannot speak for one cell: the second is refused.
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
        self.members[slot] = _Member(ticket, answer, avoid)
        self.passed.discard(ticket.peer)
        self.batch.hand_in(ticket.peer, ticket.samples)
        self.steps.hand_in(ticket.peer, now)
        self._first_ticket_at = now if self._first_ticket_at is None else self._first_ticket_at
        self.last_activity = now
        self.stir()
        return answer

    def remove(self, peer: str, answer: asyncio.Future[Answer]) -> None:
        """Forget a member that went away, unless it came again meanwhile."""
        member = self.members.get(self.slot_of(peer))
        if member is not None and member.answer is answer:
            del self.members[self.slot_of(peer)]
            self.stir()

    def holder(self, peer: str) -> str:
        """Return the other peer that holds this one's slot; empty if there is none."""
        member = self.members.get(self.slot_of(peer))
        return "" if member is None or member.ticket.peer == peer or self.over else member.ticket.peer

    def dismiss(self, peer: str, reason: str) -> None:
        """Refuse a ticket that was taken before."""
        member = self.members.get(self.slot_of(peer))
        if member is not None and member.ticket.peer == peer and not member.answer.done():
            member.answer.set_result(Refused(reason))
            del self.members[self.slot_of(peer)]
            self.stir()

    def has(self, peer: str) -> bool:
        """Return True if this peer handed in a ticket."""
        member = self.members.get(self.slot_of(peer))
        return member is not None and member.ticket.peer == peer

    def report(self, peer: str, report: Report) -> None:
        """Note how far a peer is in this round."""
        self.batch.report(peer, report)
        self.last_activity = report.reported_at
        self.stir()

    def report_steps(self, peer: str, report: StepReport) -> None:
        """Note how many local steps a peer has done in this round."""
        self.steps.report(peer, report, MAX_REPORTS)
        self.last_activity = report.heard_at
        self.stir()

    @property
    def reporters(self) -> set[str]:
        """The peers that reported."""
        return {*self.batch.peers, *self.steps.peers}

    def stir(self) -> None:
        """Wake all that wait for a change."""
        self.changed.set()
        self._stirred.set()
        self._stirred = asyncio.Event()

    async def wait_for_change(self, timeout_seconds: float) -> None:
        """Return after a change, or after this time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._stirred.wait()

    def situation(self, expected: list[str], now: float) -> Situation:
        """Drop members that went away, and return the facts for `decide` if these slots are waited for."""
        self.members = {slot: member for slot, member in self.members.items() if not member.answer.done()}
        missing = [slot for slot in expected if slot not in self.members]
        waiting = 0.0 if self._first_ticket_at is None else now - self._first_ticket_at
        is_full = self.batch.is_full or self.steps.is_due(now)
        situation = Situation(len(self.members), len(missing), is_full, waiting, None, of_delegates=self.key.level > 0)
        if not has_quorum(situation, self.spec):
            self._quorum_at = None
            return situation
        self._quorum_at = now if self._quorum_at is None else self._quorum_at
        return replace(situation, seconds_since_quorum=now - self._quorum_at)

    def next_change(self, now: float) -> float:
        """Return the seconds until `decide` may decide otherwise without any message; bounded."""
        times = [2.0]
        if self.steps.at is not None and not self.closing:
            times.append(self.steps.at - now)
        if self._first_ticket_at is not None:
            times.append(self._first_ticket_at + self.spec.matchmaking_seconds - now)
        if self._quorum_at is not None:
            times.append(self._quorum_at + self.spec.grace_seconds - now)
        return max(0.0, min(times)) + 0.001

    def answer_all(self, answer: Answer) -> None:
        """Give every member the same answer, and end this."""
        self.over = True
        for member in self.members.values():
            if not member.answer.done():
                member.answer.set_result(answer)
        self.stir()

    def form(self) -> list[str]:
        """Put the group together and answer everybody; return the peers in it.

        Members whose digest differs from the most common one are refused (they must re-sync), as are members that
        cannot work with the others, and those beyond the group size; they keep their work for the next round.
        """
        digests = Counter((m.ticket.digest, m.ticket.layout) for m in self.members.values())
        common = max(digests, key=lambda key: (digests[key], key))
        chosen: list[Ticket] = []
        by_peer = {member.ticket.peer: member for member in self.members.values()}
        for peer in sorted(by_peer, key=lambda p: rank(p, self.key)):
            member = by_peer[peer]
            if member.answer.done():
                continue
            if (member.ticket.digest, member.ticket.layout) != common:
                same_layout = member.ticket.layout == common[1]
                what = "state" if same_layout else "model layout or codec"
                member.answer.set_result(Refused(f"your {what} differs from the group's", mismatch=same_layout))
            else:
                chosen.append(member.ticket)
        kept = without_conflicts({t.peer: by_peer[t.peer].avoid for t in chosen}, self.spec.min_peers)
        for ticket in [ticket for ticket in chosen if ticket.peer not in kept[: self.spec.group_size]]:
            full = ticket.peer in kept
            why = "the group is full" if full else "rounds with you and another member broke again and again"
            by_peer[ticket.peer].answer.set_result(Refused(f"{why}: your work waits a round"))
            chosen.remove(ticket)
        members = sorted(chosen, key=lambda ticket: ticket.peer)
        self.answer_all(Formed(tuple(members)))
        return [ticket.peer for ticket in members]
